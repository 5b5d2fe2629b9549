"""Small faults, each of which the tests beside its file must notice: `make test-faults`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`text`, which occurs once in `file`, becomes `replacement`; `test` is a file, or one test of it."""

    file: str
    text: str
    replacement: str
    test: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.file}: {self.text} -> {self.replacement}".split())

    @property
    def noticed_by(self) -> str:
        """What is run; without `test` the file of the same name in the same room."""
        room, _, name = self.file.removeprefix("betahook/").rpartition("/")
        return self.test or "/".join(filter(None, ["tests/unit", room, f"test_{name}"]))


NOTES = "tests/unit/control/test_notes.py"
SEARCH = "tests/unit/control/test_search_defaults.py"
CHECKPOINT = "tests/unit/checkpoint/test_checkpoint.py"
SCHEMA = "tests/unit/checkpoint/test_schema.py"
FINGERPRINT = "tests/unit/checkpoint/test_fingerprint.py"
STATE = "tests/unit/state/test_state.py"
COMPILED = "tests/models/test_compiled.py"
MPS = "tests/models/test_mps.py"
MODES = "tests/unit/models/test_modes.py"
TRANSFORMED = "tests/models/test_transforms.py"
EXPORTED = "tests/models/test_backends.py::test_an_exported_model_keeps_beta_without_its_hook"
VERIFICATION = "tests/unit/keep/test_verification.py"
CLIPPING = "tests/unit/step/test_clipping.py"
PLACES = "tests/unit/models/test_places.py"
FIRST_FORWARD = "tests/unit/models/test_first_forward.py"
TRIAL = "tests/unit/models/test_trial.py"
PARAMETERS = "tests/unit/models/test_parameters.py"
HANDLERS = "tests/unit/tap/by_hand/test_handlers.py"
AXES = "tests/unit/tap/by_hand/test_head_axes.py"
LOADED = "tests/unit/tap/by_hand/test_loaded_beta.py"
MASKS_OR_BIASES = "tests/unit/tap/by_hand/test_masks_or_biases.py"
TRACES = "tests/unit/tap/by_hand/test_traces.py"
SHADOWS = "tests/unit/tap/by_hand/test_shadows.py"
REPORTS = "tests/unit/cli/test_report.py"
SHOW_AND_FOLD = "tests/unit/cli/test_show_and_fold.py"
LEFT_ALONE = "tests/unit/tap/by_hand/test_left_alone.py"
BANDS = "tests/unit/tap/by_hand/test_bands.py"
SCALES = "tests/unit/tap/by_hand/test_scales.py"
POSITIONS = "tests/unit/tap/by_hand/test_positions.py"
ADAPTERS = "tests/models/test_adapters.py"
RULES = "tests/unit/control/test_rules.py"
IDLE = "tests/unit/tap/test_idle.py"
PENDING = "tests/unit/state/test_pending.py"
STAGES = "tests/unit/step/test_stages.py"
WINDOW = "tests/unit/step/test_window.py"
HOOK = "tests/unit/test_hook.py"
MEASURING = "tests/unit/test_hook_measuring.py"
CHARTS = "tests/unit/report/test_html.py"
EXAMINE = "tests/unit/cli/test_examine.py"
COPIES = "tests/unit/tap/test_copies.py"
RECORDER = "tests/unit/tap/test_recorder.py"
BYPASSED = "tests/unit/tap/by_hand/test_bypassed.py"
WRAPPED = "tests/unit/tap/by_hand/test_wrapped.py"
ORIGINAL = "tests/unit/tap/by_hand/test_original.py"
DISCOVERED = "tests/unit/models/test_discovery.py"
FORMS = "tests/unit/tap/by_hand/test_products_forms.py"
SETTLED = "tests/unit/tap/by_hand/test_settled.py"
CHECKPOINTED = "tests/unit/tap/by_hand/test_checkpointing.py"
ROWS = "tests/unit/measure/test_rows.py"
CALLS = "tests/unit/measure/test_calls.py"
MATRIX = "tests/unit/measure/test_rows_of_a_matrix.py"
TOGETHER = "tests/unit/measure/test_together.py"
SCORES = "tests/unit/measure/test_scores.py"


def of_trainer(test: str, file: str) -> str:
    """One of the tests of the Trainer, which take long together."""
    return f"tests/unit/integrations/{file}::test_{test}"


FAULTS = [
    # examination and the command
    Fault("betahook/examination.py", ", random_state_kept(hook.model.parameters()):", ":"),
    Fault(
        "betahook/report/precision.py", "torch.expm1(max_logit * limits.eps / 2)", "torch.expm1(max_logit * limits.eps)"
    ),
    Fault("betahook/report/html.py", "[html.escape(cell) for cell in cells]", "list(cells)"),
    Fault(
        "betahook/report/charts.py", "value, low, high = math.log(value), math.log(low), math.log(high)", "pass", CHARTS
    ),
    Fault("betahook/cli/commands.py", "if state is not None:\n            if", "if False:\n            if", EXAMINE),
    Fault("betahook/cli/pages.py", 'kind.migrate(entry["state"])', "{}", SHOW_AND_FOLD),
    Fault("betahook/cli/runs.py", 'name.replace("_", "/", 1) if name.startswith("eval_")', "name if False", REPORTS),
    # report
    Fault(
        "betahook/report/audit.py",
        "if not all(parameter.is_meta for",
        "if True or all(parameter.is_meta for",
        REPORTS,
    ),
    Fault("betahook/report/audit.py", '"?" if value != value', '"?" if not value'),
    Fault("betahook/report/alerts.py", 'value < limit if quantity == "entropy" else', ""),
    Fault("betahook/report/alerts.py", '("max_logit", "logit_std", "entropy")', '("max_logit", "entropy")'),
    Fault("betahook/report/history.py", "turned = before * move < 0 or", "turned = before * move < 0 and"),
    Fault("betahook/report/history.py", "            self._logs *= 2", "            self._logs += 2"),
    Fault("betahook/report/history.py", "if one.relative_entropy < other", "if one.relative_entropy > other"),
    Fault(
        "betahook/report/panels.py",
        "places = ((flat, FLAT), (",
        "places = ((1.0, FLAT), (",
        "tests/unit/report/test_pictures.py",
    ),
    Fault("betahook/report/summary.py", "{**self._seen, **summarise(findings)}", "summarise(findings)"),
    Fault("betahook/report/pictures.py", "if classify(numbers) is condition", "if numbers.sink > 0.5"),
    Fault("betahook/report/glance.py", "self._drawn * SPACING", "self._drawn"),
    Fault("betahook/report/glance.py", "findings.step if step is None else step", "findings.step"),
    Fault(
        "integrations/reports.py",
        "self._summarise(findings), None",
        "self._summarise(findings), self._image",
        "tests/unit/integrations/test_reports.py",
    ),
    Fault("integrations/reports.py", "**chosen(self._metrics, self._quantities),", "**self._metrics,"),
    Fault("betahook/report/summary.py", "max(measured, key=lambda each", "min(measured, key=lambda each"),
    Fault(
        "integrations/tensorboard.py",
        "before in (None, value)",
        "True",
        "tests/unit/integrations/test_tensorboard.py",
    ),
    Fault(
        "betahook/control/search.py",
        "        if direction > 0 and at_bound:",
        "        if at_bound:",
        "tests/unit/control/test_notes.py",
    ),
    Fault("betahook/control/notes.py", "for note in notes) / len(notes)", "for note in notes)"),
    Fault("betahook/report/conditions.py", "slack = SLACK if before is self.condition", "slack = SLACK if before"),
    Fault("betahook/report/conditions.py", "return self.entropy / self.flat_entropy if", "return self.keys_share if"),
    Fault("betahook/report/findings.py", "and later else state.steps", "and later else 1"),
    Fault(
        "betahook/report/findings.py",
        "is_first_look = state.findings_step < state.steps",
        "is_first_look = state.steps > 0",
    ),
    Fault("betahook/report/findings.py", "100 * (10**finding.note.move - 1)", "100 * finding.note.move"),
    Fault("betahook/report/findings.py", 'notes.pop("", None)', "pass"),
    Fault("betahook/report/names.py", "name[:first:-1]", "name[::-1]"),
    Fault("betahook/report/names.py", "place < len(name) and name[place].isdecimal()", "place < len(name)"),
    Fault("betahook/report/names.py", "runs(sorted(int(name[place])", "runs((int(name[place])"),
    Fault("betahook/report/charts.py", "chart.ends or _range", "_range", "tests/unit/report/test_html.py"),
    Fault(
        "betahook/report/charts.py",
        "len(names) > 1 or chart.colours",
        "len(names) > 1",
        "tests/unit/report/test_html.py",
    ),
    Fault("integrations/tensorboard.py", "if tag not in PLACES:", "if tag:"),
    # measure
    Fault("betahook/measure/pairs.py", "count > 0, count.clamp(min=1).log()", "count > 0, count"),
    Fault("betahook/measure/pairs.py", "hidden[..., 0] &= count > 0", "hidden[..., 0] &= True"),
    Fault("betahook/measure/pairs.py", "torch.where(mask.structured, exact, 0)", "exact"),
    Fault("betahook/measure/pairs.py", "bias.masked_fill(~allowed, 0)", "0"),
    Fault("betahook/measure/calls.py", "torch.where(mask.structured, exact, sampled.pop(0))", "exact"),
    Fault("betahook/measure/statistics.py", "found * scales[:, None]", "torch.stack([found, found])"),
    Fault("betahook/measure/together.py", "self.heads.start == other.heads.stop", "True", TOGETHER),
    Fault("betahook/measure/together.py", "self.given.tensor is other.given.tensor", "True", TOGETHER),
    Fault("betahook/measure/together.py", "if unchanged:", "if True:", TOGETHER),
    Fault("betahook/measure/inputs.py", "columns[2 * side], columns", "columns[side], columns", TOGETHER),
    Fault("betahook/tap/by_hand/rearranging.py", "trace.shifted and not rows_stay", "False", HANDLERS),
    Fault("betahook/tap/by_hand/rearranging.py", "if not heads_stay or any(", "if any(", HANDLERS),
    Fault("betahook/tap/recorder.py", "query.requires_grad and key.requires_grad and", "True and", TOGETHER),
    Fault("betahook/measure/inputs.py", "                self._add(table, name)\n", "                pass\n"),
    Fault("betahook/measure/inputs.py", "dtype=dtype).square()\n    return", "dtype=dtype)\n    return"),
    Fault("betahook/measure/rows.py", "entropy = entropy * pairs.filled[..., None]", "pass"),
    Fault("betahook/measure/rows.py", "share]).mul_(pairs.filled)", "share])"),
    Fault("betahook/measure/prefix.py", "device=like.device).tril()", "device=like.device)"),
    Fault(
        "betahook/tap/recorder.py",
        "return compat.is_captured(self.state.device) or",
        "return True or",
        "tests/models/test_backends.py::test_one_graph_measures_the_layers_in_turn",
    ),
    Fault(
        "betahook/tap/recorder.py",
        "and self._local_heads == self.heads:",
        "and self._local_heads < self.heads:",
        "tests/models/test_backends.py::test_layers_that_are_compiled_one_by_one_share_their_code",
    ),
    Fault(
        "betahook/state/state.py",
        "compat.is_captured(self.device) or self.factors.note",
        "self.factors.note",
        "tests/models/test_cost.py::test_a_graph_that_is_launched_without_python_measures_all_layers_by_the_beta_of_the_step",
    ),
    Fault("betahook/measure/prefix.py", ".tril(-1)", ".tril()"),
    Fault("betahook/measure/prefix.py", "mean.add_(offset)", "mean"),
    Fault("betahook/measure/prefix.py", "score, mean, value=-1, out", "score, mean, value=0, out"),
    Fault("betahook/tap/recorder.py", "last[0]() is tensor and last[1] == version", "last[0]() is tensor", RECORDER),
    Fault("betahook/measure/masks.py", "facts is None or type(like) is not Tensor", "facts is None"),
    Fault("betahook/measure/masks.py", "mask.stride(dim) == 0 and len(mask)", "False"),
    Fault("betahook/measure/masks.py", "like.dtype, sizes", "sizes"),
    Fault("betahook/theory.py", "return head_dim.sqrt()", "return head_dim"),
    Fault("betahook/theory.py", "return squares - query_mean_square * key_mean_square", "return squares"),
    Fault("betahook/theory.py", "(math.sqrt(rows) + math.sqrt(columns))", "math.sqrt(rows + columns)"),
    Fault(
        "betahook/measure/components.py", "[query_mean.square(), query_variance,", "[query_mean.abs(), query_variance,"
    ),
    Fault("betahook/measure/components.py", "key_square - key_mean.square()", "key_square"),
    Fault(
        "betahook/measure/components.py",
        "part[:, None].expand(shape)",
        "part.repeat(shape[1], 1).view(shape)",
    ),
    Fault("betahook/measure/correlations.py", "mean.mean() - 1 / count", "mean.mean()"),
    Fault("betahook/measure/correlations.py", "repeat_interleave(group, 1)", "repeat(1, group, 1, 1)"),
    Fault("betahook/measure/correlations.py", "- self.values.square().sum((0, 2))", ""),
    Fault(
        "betahook/report/audit.py",
        "update, turn=state.turn, paused=state.paused",
        "update, turn=range(0), paused=state.paused",
        "tests/unit/report/test_audit.py",
    ),
    Fault("betahook/measure/rows.py", " + rest.sum(-1) / count.clamp(min=1)", "", MATRIX),
    Fault("betahook/measure/rows.py", "masked_fill(~seen, 0)", "masked_fill(seen, 0)", MATRIX),
    Fault("betahook/measure/rows.py", "allowed.sum(-1, dtype", "allowed[..., :1].sum(-1, dtype", MATRIX),
    Fault(
        "betahook/measure/groups.py",
        "statistics.by_segment(values, reduction, self.lengths)",
        'statistics.by_segment(values, "mean", self.lengths)',
    ),
    Fault(
        "betahook/measure/groups.py", "self.key_width, observed.input_std_k", "self.query_width, observed.input_std_k"
    ),
    Fault("betahook/measure/masks.py", "distance > self.low", "distance >= self.low"),
    Fault("betahook/measure/masks.py", "if known_version != version", "if known_version is None"),
    Fault("betahook/measure/masks.py", "documents == documents[:, :1]", "documents == documents"),
    Fault("betahook/measure/masks.py", "queries[:, :, None] & keys[:, None, :]", "keys[:, None, :]"),
    Fault("betahook/measure/pairs.py", "ROWS = 32", "ROWS = 24", ROWS),
    Fault("betahook/measure/rows.py", "LOWEST = -80.0", "LOWEST = -8.0"),
    Fault("betahook/measure/pairs.py", "(2 * index + 1) * queries // (2 * ROWS)", "index * queries // ROWS", ROWS),
    Fault("betahook/measure/pairs.py", "else queries / ROWS", "else 1.0", CALLS),
    Fault("betahook/measure/calls.py", "each * sums for sums", "sums for sums", CALLS),
    Fault("betahook/measure/calls.py", "flat.shape[1] == tokens.shape[2]", "flat.shape[1] == tokens.shape[3]", CALLS),
    Fault("betahook/tap/listening.py", "allowed.any(-2)", "allowed.any(-3)", "tests/unit/report/test_audit.py"),
    Fault("betahook/measure/masks.py", "start + self.low + 1, 0)", "start + self.low + 2, 0)", ROWS),
    Fault("betahook/measure/masks.py", "stop + self.high, 0)", "stop + self.high - 1, 0)", ROWS),
    Fault(
        "betahook/measure/rows.py",
        "torch.tanh(scores * beta / softcap) + pairs.added",
        "torch.tanh((scores * beta + pairs.added) / softcap)",
    ),
    Fault("betahook/measure/pairs.py", "queries * keys <= SHORT**2", "queries <= SHORT"),
    Fault(
        "betahook/measure/scores.py",
        "for start, stop in _slabs(queries)",
        "for start, stop in _slabs(queries - 1)",
    ),
    Fault(
        "betahook/measure/scores.py",
        "view(-1, groups, BLOCK, BLOCK).tril_()",
        "view(-1, groups, BLOCK, BLOCK).tril_(-1)",
    ),
    Fault("betahook/measure/scores.py", "square -= less_square", "square += less_square"),
    Fault("betahook/measure/scores.py", "+ 2 * shift * total +", "+ shift * total +"),
    Fault("betahook/measure/scores.py", "self._take_until(self.keys)\n", "self._take_until(self.seen)\n"),
    Fault("betahook/measure/scores.py", "square - rest.square()", "square"),
    Fault("betahook/measure/scores.py", "row_square = square - (score", "row_square = square - 0 * (score"),
    Fault("betahook/measure/dtypes.py", "torch.finfo(product_dtype(dtype)).max", "torch.finfo(dtype).max", SCORES),
    Fault(
        "betahook/measure/statistics.py",
        '[ROW["score_square"]] - (by_head',
        '[ROW["score_square"]] + (by_head',
    ),
    Fault("betahook/measure/statistics.py", "maxima[rank] = torch.cat", "maxima[0] = torch.cat"),
    Fault("betahook/measure/statistics.py", 'ratios.log(), "mean"', 'ratios, "mean"'),
    Fault("betahook/state/state.py", "torch.where(measured, table, self.recent)", "table.clone()", STATE),
    Fault("betahook/measure/components.py", "torch.where(known, with_averages, table)", "with_averages"),
    Fault("betahook/state/state.py", "return self.steps - self.skipped_steps", "return self.steps", WINDOW),
    Fault("betahook/state/pending.py", "sensitivity.masked_fill(broken, 0)", "sensitivity"),
    Fault("betahook/tap/recorder.py", "not self.state.beta_acts and", "True and", IDLE),
    Fault(
        "betahook/tap/recorder.py", " and self.module.training and not self.is_due()", " and not self.is_due()", IDLE
    ),
    Fault("betahook/checkpoint/schema.py", "    state.beta_acts |= not bool(state.beta.isnan().all())\n", "", IDLE),
    Fault("betahook/layer.py", "        self._state.beta_acts = True\n        try:", "        try:", IDLE),
    Fault("betahook/step/stages.py", "if state.beta_acts else state.turn", "", WINDOW),
    Fault(
        "betahook/step/stages.py", "torch.where(measured, torch.div(*summed), sensitivity", "torch.div(*summed", WINDOW
    ),
    Fault(
        "betahook/step/stages.py",
        "if last and (last[0].heads, last[0].number) != (heads, state.steps)",
        "if False",
        WINDOW,
    ),
    Fault("betahook/state/pending.py", "(first + steps[0].number)", "steps[0].number"),
    Fault(
        "betahook/step/stages.py",
        "if len(state.pending) == pending.MOST",
        "if False",
        PENDING,
    ),
    Fault("betahook/step/stages.py", " and not (loss_scale.skipped and state.batches > 0)", "", WINDOW),
    Fault(
        "betahook/state/pending.py", "(torch.stack([step.sums for step in steps]) + sensitivity) * 0", "sensitivity * 0"
    ),
    Fault(
        "betahook/cli/runs.py",
        "    except ValueError:\n        return []",
        "    except KeyError:\n        return []",
        REPORTS,
    ),
    Fault("betahook/cli/runs.py", "except (OSError, ValueError, RuntimeError)", "except OSError", REPORTS),
    Fault("betahook/step/loss_scale.py", "expected = max(", "expected = min(", "tests/models/test_loops.py"),
    Fault(
        "betahook/step/stages.py",
        "    try:\n        yield measured\n    finally:",
        "    yield measured\n    if True:",
        STAGES,
    ),
    Fault("betahook/step/stages.py", "torch.div(*summed, out", "torch.mul(summed[0], 1, out", WINDOW),
    Fault(
        "betahook/control/base.py",
        "        accepted = False\n",
        "        raise\n",
        RULES,
    ),
    Fault("betahook/control/search.py", "alpha=observation.batches", "alpha=1"),
    Fault("betahook/control/search.py", "if not direction and without_gradient:", "if not direction:", NOTES),
    Fault("betahook/step/stages.py", "(ceil(part * groups / interval)", "(part * (groups // interval)", STAGES),
    Fault("betahook/options.py", "1 if limited or any(", "1 if any(", MEASURING),
    Fault(
        "betahook/state/state.py",
        'measured = table[statistics.ROW["pairs"]] > 0',
        'measured = table[statistics.ROW["pairs"]] >= 0',
        MEASURING,
    ),
    Fault("betahook/measure/statistics.py", "square / count - (total / count).square()", "square / count"),
    Fault("betahook/measure/groups.py", "population_std(*key)", "population_std(*query)"),
    Fault(
        "betahook/measure/masks.py",
        "max(stop + self.high, 0)",
        "max(start + self.high, 0)",
        "tests/unit/measure/test_largest.py",
    ),
    Fault("betahook/measure/largest.py", "lowest <= band.low", "lowest < band.low"),
    Fault("betahook/measure/largest.py", "mask.pairs.shape[1] == 1", "mask.pairs.shape[1] > 0"),
    Fault("betahook/measure/scores.py", "torch.maximum(positive, 0 - scores.amin(over))", "positive"),
    Fault("betahook/measure/masks.py", "(addend <= too_low)", "(addend <= MASKED)"),
    Fault("betahook/measure/masks.py", "| (addend == least_half)", ""),
    Fault("betahook/measure/masks.py", "None if is_boolean else pairs", "pairs"),
    Fault("betahook/measure/masks.py", "masked |= has_gap & low", "masked |= False"),
    Fault("betahook/measure/masks.py", " & ~low.all()", "", MASKS_OR_BIASES),
    Fault(
        "betahook/measure/masks.py",
        "GAPS = (math.log(torch.finfo(torch.float32).tiny), -9000.0)",
        "GAPS = (math.log(torch.finfo(torch.float32).tiny),)",
        MASKS_OR_BIASES,
    ),
    Fault(
        "betahook/tap/by_hand/arithmetic.py",
        "is_beta = situation.at_first(factor is not None)",
        "is_beta = factor is not None",
        SCALES,
    ),
    Fault("betahook/tap/by_hand/arithmetic.py", "first = first._replace(axis=situation.axis_of(left))", "pass", SCALES),
    Fault(
        "betahook/tap/by_hand/watching.py", "_put_back(layer.module), unsaved, ", "_put_back(layer.module), ", LOADED
    ),
    Fault(
        "betahook/tap/by_hand/watching.py",
        "for names in (vars(part), part._buffers)",
        "for names in (vars(part),)",
        LOADED,
    ),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "elif not _are_alike",
        "elif _are_alike",
        TRACES,
    ),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "if not are_read:",
        "if True:",
        SCALES,
    ),
    Fault("betahook/tap/by_hand/arithmetic.py", "return trace if isinstance(trace, Operand) else", "return", SCALES),
    Fault("betahook/layer.py", "torch.where(gain == 1, torch.nan, gain * default)", "gain * default"),
    Fault("betahook/models/labels.py", 'UNKNOWN if mode == "constant" else value', "value", AXES),
    Fault("betahook/models/torch_calls.py", "other.contiguous() if", "other if", MASKS_OR_BIASES),
    Fault("betahook/models/torch_calls.py", "int(input.dim() not in (0, 1, 3))", "-1"),
    Fault("betahook/models/torch_calls.py", "return (2,), (1,)", "return None", TRIAL),
    Fault("betahook/models/labels.py", "if is_matrix or self._is_learned(weight):", "if True:", TRACES),
    Fault(
        "betahook/tap/by_hand/shadows.py",
        "max(self._eps, torch.finfo(shadow.dtype).eps)",
        "torch.finfo(shadow.dtype).eps",
    ),
    Fault(
        "betahook/tap/by_hand/softmaxes.py",
        "forward.shadows.contradict(trace, input, dim)",
        "False",
        "tests/unit/tap/by_hand/test_shadows.py",
    ),
    Fault("betahook/tap/by_hand/shadows.py", "logits.amax(dim, keepdim=True).abs()", "0"),
    Fault("betahook/tap/by_hand/shadows.py", "20 * self._eps", "2000 * self._eps"),
    Fault(
        "betahook/tap/by_hand/matrices.py",
        "(GAIN - 1) * product.alpha * value",
        "(GAIN - 1) * value",
        "tests/unit/tap/by_hand/test_products.py",
    ),
    Fault("betahook/tap/by_hand/forward.py", " or tensor.shape[axis : axis + 1] == (count,)", " or True", AXES),
    Fault("betahook/tap/by_hand/forward.py", "self.form not in plan.axes", "not plan.axes", AXES),
    Fault("betahook/tap/by_hand/softmaxes.py", "is_recorded or forward.labels is not None:", "is_recorded:", AXES),
    # control
    Fault("betahook/control/base.py", "DECADES = 3.0", "DECADES = 4.0"),
    Fault(
        "betahook/control/rules.py",
        "ceiling(self.threshold, observation.statistics.max_score_bound)",
        "ceiling(self.threshold, observation.statistics.max_score)",
    ),
    Fault("betahook/control/base.py", "(logit / score).nan_to_num", "(score / logit).nan_to_num", RULES),
    Fault("betahook/control/base.py", "else _choose(healthy, made, before)", "else made"),
    Fault("betahook/control/base.py", "or proposed.shape != beta.shape:", ":"),
    Fault("betahook/control/base.py", " or len(answer) != 2 or not isinstance(answer[1], dict):", ":"),
    Fault(
        "betahook/control/base.py",
        "observation.statistics.finite & (observation.statistics.count > 0)",
        "observation.statistics.count > 0",
    ),
    Fault("betahook/control/rules.py", "smoothing: float = 0.9", "smoothing: float = 0.8"),
    Fault("betahook/control/rules.py", "corrected = mean / (1 - decay**steps)", "corrected = mean"),
    Fault("betahook/control/rules.py", "step = -self.learning_rate", "step = self.learning_rate"),
    Fault("betahook/control/sign_search.py", "agreement < 0, 0.5", "agreement < 0, 0.3"),
    Fault("betahook/control/sign_search.py", "batches >= self.window", "batches > self.window"),
    Fault("betahook/control/sign_search.py", "-total.sign() * due", "total.sign() * due"),
    Fault(
        "betahook/control/sign_search.py",
        "torch.where(direction != 0, direction,",
        "torch.where(agreement == 0, direction,",
    ),
    Fault("betahook/control/search.py", "2 * max(self.opening_batches, self.warmup)", "2 * self._opening.batches"),
    Fault("betahook/control/search.py", "rise_batches: int = 100", "rise_batches: int = 140", SEARCH),
    Fault("betahook/control/search.py", "rise_logit_std: float = 3.0", "rise_logit_std: float = 4.5", SEARCH),
    Fault("betahook/control/search.py", "growth: float = 1.5", "growth: float = 1.2", SEARCH),
    Fault("betahook/control/search.py", "fresh_ratio: float = 1.1", "fresh_ratio: float = 1.2", SEARCH),
    Fault("betahook/control/search.py", "plateau_batches: int = 70", "plateau_batches: int = 60", SEARCH),
    Fault("betahook/control/search.py", "observation.overflow * self.fresh_bound", "observation.overflow"),
    Fault(
        "betahook/control/search.py",
        "torch.maximum(old, ceiling(logit, observation.statistics.max_score))",
        "ceiling(logit, observation.statistics.max_score)",
    ),
    Fault("betahook/control/search.py", "rise == 100, Phase.WARM_UP", "rise == 101, Phase.WARM_UP"),
    Fault(
        "betahook/control/opening.py", "spectral_ratio() <= self.fresh_ratio", "spectral_ratio() < 2 * self.fresh_ratio"
    ),
    Fault("betahook/control/opening.py", "beta=course.beta / down)", "beta=course.beta)"),
    Fault("betahook/control/opening.py", "random & ~learns", "random"),
    Fault("betahook/control/opening.py", "observation.loss().abs()", "observation.loss()"),
    Fault("betahook/control/opening.py", "course.fall.abs()", "course.fall"),
    Fault("betahook/control/opening.py", "(grown & (course.spread > 0)).any()", "grown & (course.spread > 0)"),
    Fault("betahook/control/opening.py", "step > self.warmup - self.window", "step >= self.warmup - self.window"),
    Fault("betahook/control/search.py", "plateau_fall: float = 0.03", "plateau_fall: float = 0.06", SEARCH),
    Fault("betahook/step/training_loss.py", "is_compiling() or state.batch < batches", "is_compiling() or True"),
    Fault("betahook/step/training_loss.py", "if is_judged or state.batch < batches:", "if True:"),
    Fault("betahook/step/training_loss.py", "sums.isfinite().all()", "sums.isfinite().any()"),
    Fault("betahook/control/opening.py", ".clamp(min=0) / course.left", ".clamp(min=0) / self.rise_batches"),
    Fault("betahook/control/opening.py", "course.left.masked_fill(climbs, self.rise_batches)", "course.left"),
    Fault("betahook/control/decades.py", "nan_to_num(nan=torch.inf,", "nan_to_num(nan=-torch.inf,"),
    Fault("betahook/control/decades.py", "batches >= self.window", "batches > self.window"),
    Fault("betahook/control/decades.py", "score > trial.score_below", "score > trial.best_score"),
    Fault("betahook/control/decades.py", "self.drift * trial.best_score.abs()", "self.drift"),
    Fault("betahook/control/decades.py", "ended & self._searches(trial), centre", "ended, centre"),
    Fault(
        "betahook/control/base.py",
        "(known if controller.uses_loss else healthy)",
        "healthy",
        "tests/unit/control/test_decades.py",
    ),
    Fault(
        "betahook/step/training_loss.py",
        "compat.is_transformed()",
        "False",
        f"{TRANSFORMED}::test_the_training_loss_is_not_recorded_either",
    ),
    Fault("betahook/step/training_loss.py", "loss.requires_grad) or state.paused", "loss.requires_grad)"),
    Fault("betahook/step/training_loss.py", 'state.table[ROW["losses"]] = 1', "pass"),
    Fault("betahook/step/training_loss.py", "state.recent[OF_STEP].sum(1)", "state.recent[OF_STEP].flip(0).sum(1)"),
    Fault("betahook/control/beta_search.py", "            step /= 2", "            step /= 3"),
    Fault("betahook/control/beta_search.py", "<= self.noise", "< self.noise"),
    Fault("betahook/control/beta_search.py", 'score if self.mode == "max" else -score', "score"),
    Fault("betahook/control/beta_search.py", "self.largest_beta * (1 + 1e-9)", "self.largest_beta * 2"),
    # tap
    Fault(
        "betahook/tap/gain.py",
        "ctx.save_for_backward(scaled, gain, probe)",
        "ctx.save_for_backward(query, gain, probe)",
    ),
    Fault("betahook/tap/gain.py", "gain = gain * probe.exp().view(gain.shape)", "gain = gain * 1"),
    Fault("betahook/tap/gain.py", "_times(gradient, gain) if", "gradient if"),
    Fault("betahook/tap/gain.py", "query.requires_grad or any(x.requires_grad for x in others)", "query.requires_grad"),
    Fault("betahook/tap/gain.py", "not layer.state.paused, product)", "True, product)"),
    Fault(
        "betahook/tap/recorder.py",
        "compat.is_in_backward() if recorder.always else compat.is_recomputation()",
        "compat.is_in_backward()",
        MEASURING,
    ),
    Fault(
        "betahook/tap/recorder.py",
        "self.module.training and torch.is_grad_enabled()",
        "self.module.training",
        MEASURING,
    ),
    Fault("betahook/compat.py", "frame.f_globals is vars(torch.utils.checkpoint)", "False"),
    Fault("betahook/compat.py", 'kinds[names.index("FSDPModule") + 1]', "kinds[0]"),
    Fault("betahook/compat.py", "if kind.__module__ != parametrize.__name__)", ")"),
    Fault("betahook/compat.py", 'if hasattr(parameter, "full_tensor"):', "if False:"),
    Fault("betahook/compat.py", ' or attribute.startswith("__composable_api_state_key")', ""),
    Fault(
        "betahook/tap/interface.py",
        "last = keys - queries",
        "last = 0",
        "tests/unit/tap/test_interface.py::test_which_pairs_an_attention_uses",
    ),
    Fault(
        "betahook/tap/interface.py",
        "Band(-window - 1, window)",
        "Band(-window, window)",
        "tests/unit/tap/test_interface.py::test_which_pairs_an_attention_uses",
    ),
    Fault("betahook/tap/interface.py", "default = scaling * prescale", "default = scaling"),
    Fault("betahook/tap/by_hand/contraction.py", "and tensor.shape[here.dim] == 1", "and False"),
    Fault("betahook/tap/by_hand/contraction.py", "return axis._replace(dim=dim) if", "return axis if"),
    Fault("betahook/models/labels.py", "kept.contiguous() if", "kept if", AXES),
    Fault("betahook/models/labels.py", 'REDUCING = {"max", ', "REDUCING = {", AXES),
    Fault("betahook/models/torch_calls.py", " and other.stride() != tensor.stride()", "", AXES),
    Fault("betahook/tap/by_hand/handlers.py", "if dims is None or -1 in dims or last in dims:", "if True:", HANDLERS),
    Fault("betahook/tap/by_hand/situation.py", "return Operand(learned=True) if", "return Operand() if", POSITIONS),
    Fault("betahook/tap/by_hand/situation.py", "if call.name in PROJECTIONS or", "if", POSITIONS),
    Fault(
        "betahook/tap/by_hand/watching.py",
        "or_learned, learned = forward.traces, True, name",
        "or_learned, learned = forward.traces, False, name",
        POSITIONS,
    ),
    Fault(
        "betahook/tap/by_hand/contraction.py",
        "return torch.bmm(left, self.right)",
        "return self.alpha * torch.bmm(left, self.right)",
    ),
    Fault("betahook/tap/by_hand/contraction.py", "set(right_axes) - set(output)", "set(right_axes)"),
    Fault("betahook/tap/recorder.py", "raw / factor", "raw"),
    Fault("betahook/tap/by_hand/softmaxes.py", "prescale * acting.view(-1, 1, 1)", "prescale", SCALES),
    Fault("betahook/tap/by_hand/softmaxes.py", "trace.products[0].acting ", "layer.local_gain(None) ", SCALES),
    Fault("betahook/tap/recorder.py", "return ranks * probe[first", "return probe[first"),
    Fault("betahook/tap/override.py", "if attributes.get(self._name) is self._value", "if self._name in attributes"),
    Fault("betahook/tap/override.py", "attributes[self._name] is not self._value", "False", COPIES),
    Fault("betahook/tap/copies.py", "if key != identity", "if key == identity"),
    Fault(
        "betahook/state/state.py",
        "sums.masked_fill_(state.by_component(state.alone), 0)",
        "pass",
        "tests/unit/tap/by_hand/test_settled.py",
    ),
    Fault("betahook/tap/kernels.py", '0 if given.get("causal") or given.get("is_causal") else right', "0"),
    Fault("betahook/tap/copies.py", "len(reduced) < 3 or ", ""),
    Fault("betahook/step/first_look.py", "if state.seen and", "if"),
    Fault("betahook/step/first_look.py", " or torch.compiler.is_compiling()", ""),
    Fault("betahook/step/first_look.py", " and state.first_spectral_ratio is None", ""),
    Fault(
        "betahook/step/stages.py",
        "state.first_spectral_ratio if state.batch == 0 else None",
        "None",
        "tests/unit/step/test_first_look.py",
    ),
    Fault("betahook/tap/by_hand/bypassed.py", "any(other.runs for other in watch.sharing)", "watch.layer.runs"),
    Fault("betahook/tap/by_hand/bypassed.py", "layer.module.training in layer.ran_in", "layer.ran_in"),
    Fault("betahook/tap/by_hand/bypassed.py", "layer.projected |= layer.runs > 0", "pass"),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "UNSEEN if self.layer.projected and concerns else",
        "UNSEEN if concerns else",
        BYPASSED,
    ),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "UNSEEN if self.layer.projected and concerns",
        "UNSEEN if self.layer.projected",
        BYPASSED,
    ),
    Fault("betahook/tap/by_hand/forward.py", "concerns = self.recording or ", "concerns = ", BYPASSED),
    Fault("betahook/tap/by_hand/forward.py", "layer.projected = False", "layer.projected = True", BYPASSED),
    Fault("betahook/tap/by_hand/original.py", 'module if hasattr(module, "processor") else None', "None"),
    Fault("betahook/tap/by_hand/watching.py", "layer.attention.has_changed = True", "pass", ORIGINAL),
    Fault("betahook/models/torch_calls.py", "return in_place_of_torch(function) or name", "return name", WRAPPED),
    Fault("betahook/models/guards.py", " and in_place_of_torch(function) is None", "", WRAPPED),
    Fault("betahook/tap/install.py", "recorder.state.is_detached or not", "not", FIRST_FORWARD),
    Fault("betahook/keep/refusals.py", "    weight_makes_keys,\n", ""),
    Fault("betahook/models/scaling.py", "own[0] if len(own) == 1 else", ""),
    Fault("betahook/models/scaling.py", ' if each != "bias"', ""),
    Fault("betahook/models/projections.py", "int(place.rows.max()) >= found.features", "False", FIRST_FORWARD),
    Fault("betahook/models/trial.py", "numbers, [torch.empty(0)]", "numbers", FIRST_FORWARD),
    Fault(
        "betahook/layer.py",
        "projections := self.projections) is None:",
        "projections := self.projections) is ...:",
        FIRST_FORWARD,
    ),
    Fault("betahook/report/warnings.py", "elif name in replaced:", "elif False:", "tests/unit/test_hook_metrics.py"),
    Fault("betahook/tap/by_hand/bypassed.py", " or layer.module.training in layer.ran_in", ""),
    Fault("betahook/tap/install.py", "if recorder.state.beta_acts", "if False", COPIES),
    # keep
    Fault("betahook/keep/places.py", "return max(starts) < min(ends)", "return max(starts) <= min(ends)"),
    Fault("betahook/keep/places.py", 'offset=float(weight.name == "weight")', "offset=1.0"),
    Fault(
        "betahook/models/scaling.py", "        torch.clear_autocast_cache()  # a forward", "        pass  # a forward"
    ),
    Fault("betahook/models/scaling.py", "signs * of_heads", "signs", "tests/unit/models/test_scaling.py"),
    Fault(
        "betahook/models/scaling.py",
        "(weight * by_row).to(weight.dtype)",
        "(weight * by_row)",
        "tests/unit/models/test_scaling.py",
    ),
    Fault("betahook/keep/refusals.py", "(gain != gain[0]).any()", "(gain != gain[0]).all()"),
    Fault("betahook/keep/refusals.py", "not all(finite)", "not any(finite)"),
    Fault("betahook/keep/refusals.py", "plan.users[id(parameter)] > 1", "plan.users[id(parameter)] > 2"),
    Fault("betahook/keep/refusals.py", "    memory_is_shared,\n", ""),
    Fault("betahook/models/scaling.py", ".isfinite().all()", ".isfinite().any()", "tests/unit/keep/test_refusals.py"),
    Fault("betahook/keep/verification.py", "self._gain / self._gain.max() / 2", "self._gain"),
    Fault("betahook/keep/verification.py", "limits.fmax(4 * blurred", "limits.fmax(4000 * blurred", VERIFICATION),
    Fault(
        "betahook/models/modes.py",
        '"training", part.training)',
        '"training", True)',
        "tests/unit/test_examination.py",
    ),
    Fault(
        "betahook/rerun.py",
        "(type(output) in (tuple, list) and len(output) == 2)",
        "type(output) in (tuple, list)",
        "tests/unit/step/test_training_loss.py",
    ),
    Fault(
        "betahook/rerun.py",
        "alike = (x == y) | (x.isnan() & y.isnan())",
        "alike = x == y",
        "tests/unit/keep/test_verification.py",
    ),
    Fault("betahook/keep/places.py", "yield Scaling([*weights, *biases])", "pass"),
    Fault("betahook/keep/verification.py", "random_state_kept(self._plan.hook.model.parameters()), self.", "self."),
    Fault("betahook/keep/verification.py", "if self._is_random:\n", "if False:\n"),
    Fault("betahook/keep/verification.py", "if self._is_random:  #", "if False:  #"),
    Fault("betahook/keep/folding.py", "    hook.detach()\n", ""),
    Fault("betahook/keep/folding.py", "(gain != 1).any()", "(gain != 1).all()"),
    Fault("betahook/keep/folding.py", "transition.choose(hook, unfinished, undo)", "pass"),
    Fault(
        "betahook/keep/transition.py",
        "not losses[0] <= losses[1]",
        "losses[0] <= losses[1]",
        "tests/unit/keep/test_folding.py",
    ),
    Fault(
        "betahook/keep/restoring.py",
        'controller=controller or "monitor"',
        'controller=controller or "default"',
    ),
    Fault("betahook/tap/kernels.py", "Band(last - left - 1 if", "Band(last - left if"),
    Fault("betahook/tap/by_hand/shadows.py", "for_sums(logits) + change", "logits.double() + change", MPS),
    Fault(
        "betahook/report/metrics.py",
        "for_sums(column) for column in quantities.values()]).tolist",
        "column.double() for column in quantities.values()]).tolist",
        MPS,
    ),
    Fault("betahook/measure/dtypes.py", "not _has_float64(device)", "_has_float64(device)"),
    Fault("betahook/measure/statistics.py", 'values.device.type == "mps"', "False", MPS),
    Fault(
        "betahook/checkpoint/schema.py",
        ".cpu().to(like.dtype)",
        "",
        f"{MPS}::test_a_state_goes_to_a_device_and_back",
    ),
    Fault(
        "betahook/models/modes.py",
        'device.type == "mps" for device',
        "False for device",
        f"{MPS}::test_what_runs_in_between_draws_the_random_numbers_that_come_next",
    ),
    Fault("betahook/models/stand_ins.py", "if replaced.users == 0 and", "if"),
    Fault("betahook/models/stand_ins.py", " and getattr(namespace.get(name), _ATTRIBUTE, None) is replaced:", ":"),
    Fault("betahook/models/stand_ins.py", " and replaced.namespace is namespace", ""),
    # models, state, checkpoint
    Fault("betahook/models/trial.py", "size = None if left else (heads, head_dim)", "size = heads, head_dim", TRIAL),
    Fault("betahook/models/labels.py", "enumerate(labels.shape[:-1])", "enumerate(labels.shape)", PLACES),
    Fault("betahook/models/torch_calls.py", ", tuple(map(right.index, ", ", tuple(map(left.index, ", PLACES),
    Fault("betahook/models/trial.py", "if watch.found.size is not None:", "if True:", TRIAL),
    Fault("betahook/models/trial.py", "if watch.ended:", "if True:", TRIAL),
    Fault("betahook/models/trial.py", "if kind is nn.Conv2d:", "if False:", TRIAL),
    Fault("betahook/models/trial.py", "if func is torch.equal:", "if False:", TRIAL),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "== width not in tensor.shape[:-1]:",
        "== width:",
        "tests/unit/tap/by_hand/test_head_axes.py",
    ),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "if found is None and self.of_inputs is not None else found",
        "if False else found",
        "tests/unit/tap/by_hand/test_head_axes.py",
    ),
    Fault("betahook/models/classifiers.py", "sum(size > 1 for size in parameter.shape) > 1", "True", TRIAL),
    Fault("betahook/models/classifiers.py", "is_lazy(parameter) or", ""),
    Fault("betahook/models/trial.py", "len(moving) < 2, summed", "False, summed", PLACES),
    Fault("betahook/models/trial.py", "for each in watch.attentions]", "for each in watch.attentions[:1]]", PLACES),
    Fault("betahook/models/trial.py", "for width in _widths(module) if contexts", "for width in ()", PLACES),
    Fault("betahook/models/labels.py", 'if name == "batch_norm":', "if False:", PLACES),
    Fault("betahook/models/trial.py", "if compat.is_adapter(child):", "if False:", PLACES),
    Fault("betahook/models/places.py", 'or getattr(owner, "groups", 1) != 1', "", PLACES),
    Fault("betahook/models/places.py", "[[False, True], [True, False]]", "[]", PLACES),
    Fault("betahook/models/places.py", "made_of[::-1] if takes_key_first(module, made_of, linears) else", "", PLACES),
    Fault("betahook/tap/by_hand/softmaxes.py", "operands = (right, left) if", "operands = (left, right) if", PLACES),
    Fault("betahook/models/trial.py", "(others if len(others) == 1 else [])", "[]", PLACES),
    Fault(
        "betahook/models/guards.py", 'and not hasattr(function, "__wrapped__")', "", "tests/unit/tap/test_kernels.py"
    ),
    Fault("betahook/models/trial.py", "if is_handed_over(func):", "if False:", "tests/unit/models/test_guards.py"),
    Fault(
        "betahook/tap/by_hand/forward.py",
        "if self.products else self.unscored",
        "if self.products else None",
        LEFT_ALONE,
    ),
    Fault("betahook/models/discovery.py", "if module in able and", "if"),
    Fault("betahook/models/places.py", "not any(returned)", "any(returned)", PLACES),
    Fault("betahook/models/places.py", "if path and own_calls and", "if path and", PARAMETERS),
    Fault("betahook/models/places.py", "(*part._parameters, ", "(", PARAMETERS),
    Fault("betahook/models/places.py", "part.storage_offset() - whole.storage_offset()", "0", PARAMETERS),
    Fault("betahook/models/places.py", '("bias" if path else None, 0)', '("bias", 0)', PARAMETERS),
    Fault("betahook/models/places.py", "(entries[1] - rows)", "entries[1]", PARAMETERS),
    Fault("betahook/models/scaling.py", "features + offset", "features", PARAMETERS),
    Fault("betahook/models/projections.py", "bias_offset=width, ", ""),
    Fault("betahook/models/places.py", "if len(alike) > 1:", "if False:", PARAMETERS),
    Fault("betahook/models/places.py", " and tensor.numel() == other.numel()", "", PARAMETERS),
    Fault("betahook/models/labels.py", "(*linear.outputs, output)", "(output,)", PARAMETERS),
    Fault("betahook/models/labels.py", "linear if is_linear else None", "linear", PARAMETERS),
    Fault("betahook/models/labels.py", "sizes.get(axis, 1) == 1", "axis not in sizes", PARAMETERS),
    Fault("betahook/models/labels.py", "movedim(tuple(axes), ", "movedim(tuple(sorted(axes)), ", PARAMETERS),
    Fault("betahook/models/labels.py", "return torch.equal(along, ", "return True or torch.equal(along, ", PARAMETERS),
    Fault("betahook/models/places.py", "if len(offsets) == 1 else None", "if offsets else None", PARAMETERS),
    Fault("betahook/models/places.py", "if not all(summed) or", "if", PARAMETERS),
    Fault("betahook/models/places.py", "None if left.any() else (own, numbers)", "own, numbers", PARAMETERS),
    Fault("betahook/models/scaling.py", ", axes=tuple(range(bias.dim()))", "", PARAMETERS),
    Fault("betahook/models/scaling.py", "rows, axes=projection.axes)", "rows)", PARAMETERS),
    Fault("betahook/models/labels.py", "self._note_bias(call.tensors, output)", "pass", PARAMETERS),
    Fault("betahook/models/projections.py", "in type(linear).__mro__))", "in [type(linear)]))"),
    Fault("betahook/models/projections.py", "place.bias_offset, place.axes", "place.bias_offset, (0,)", PARAMETERS),
    Fault(
        "betahook/models/projections.py",
        'isinstance(width, int) and self.weight == "weight"',
        "isinstance(width, int)",
        PARAMETERS,
    ),
    Fault(
        "betahook/models/discovery.py",
        "if places is None or shown is None:",
        "if self.places is not None or places is None or shown is None:",
        PARAMETERS,
    ),
    Fault("betahook/models/discovery.py", "replace(place, argument=one.argument) for", "place for", FIRST_FORWARD),
    Fault("betahook/models/materialise.py", "weight.dim() < 2 or", "", PARAMETERS),
    Fault("betahook/models/materialise.py", "return not is_of_linear or out", "return out", PARAMETERS),
    Fault("betahook/tap/install.py", "projection.argument is not None and ", "", PARAMETERS),
    Fault("betahook/models/labels.py", "if mixed else alike", "if False else alike", PLACES),
    Fault("betahook/models/labels.py", "len(rows) != head_dim for", "len(rows) == 0 for", PLACES),
    Fault("betahook/models/labels.py", "every[::shared]", "every[:own]", PLACES),
    Fault("betahook/models/labels.py", "yield labels.chunk(count)", "yield []", PLACES),
    Fault("betahook/models/labels.py", "labels[head::count] for head", "labels[:head] for head", PLACES),
    Fault("betahook/models/labels.py", "if int(known[-1]) // FAR != projection:", "if False:", PLACES),
    Fault("betahook/models/projections.py", "- 1).flatten(1)", "- 1)", PLACES),
    Fault("betahook/models/discovery.py", "all(one.stored is other.stored for", "all(True for", FIRST_FORWARD),
    Fault(
        "betahook/tap/by_hand/softmaxes.py",
        "each.made_of for each in in_order",
        "each.made_of for each in ()",
        FIRST_FORWARD,
    ),
    Fault("betahook/tap/by_hand/softmaxes.py", "forward.made_of.append(made)", "pass", FIRST_FORWARD),
    Fault("betahook/models/discovery.py", "if plain and is_common and", "if plain and", PLACES),
    Fault("betahook/models/discovery.py", "and not any(map(is_users, owners))", "", PLACES),
    Fault("betahook/models/guards.py", "not has_mode and guard", "guard", "tests/unit/models/test_guards.py"),
    Fault("betahook/step/clipping.py", "each.weights(anew=True)", "pass", FIRST_FORWARD),
    Fault("betahook/models/trial.py", "(count_heads(module), watch.found.size)", "(watch.found.size,)", PLACES),
    Fault("betahook/models/discovery.py", "if shown.places is not None:", "if False:", PLACES),
    Fault("betahook/models/heads.py", "math.isclose(head_dim**-0.5, scale, rel_tol=1e-6)", "True", FIRST_FORWARD),
    Fault("betahook/models/heads.py", "head_dim > 1 and", "", FIRST_FORWARD),
    Fault("betahook/models/discovery.py", "if result is not None and not result.attends:", "if False:", TRIAL),
    Fault("betahook/models/code.py", "functions = reachable(kind)", "functions = methods(kind)", TRIAL),
    Fault("betahook/compat.py", "hooks.clear()", "len(hooks)", TRIAL),
    Fault("betahook/models/heads.py", "3 * heads if heads and fused and not query else heads", "heads or 0"),
    Fault("betahook/models/heads.py", "return None if misfit else heads, head_dim", "return heads, head_dim"),
    Fault("betahook/models/materialise.py", "* scale[:, None] / 127", "* scale[:, None] / 128"),
    Fault("betahook/models/materialise.py", "weight.untyped_storage().nbytes() < weight.nbytes", "False"),
    Fault("betahook/models/projections.py", "(heads, -1))[:, :head_dim])", "(heads, -1))[:, -head_dim:])"),
    Fault("betahook/models/projections.py", "(heads, -1))[:, :unturned])", "(heads, -1))[:, -unturned:])"),
    Fault(
        "betahook/state/state.py",
        "SMALLEST_BETA, LARGEST_BETA = 1e-10, 1e10",
        "SMALLEST_BETA, LARGEST_BETA = 0.0, 1e30",
        SCHEMA,
    ),
    Fault("betahook/state/factors.py", "if self._noted[layer] == beta", "if not math.isnan(self._noted[layer])"),
    Fault(
        "betahook/state/factors.py",
        "self.own[heads] = math.nan if beta is None else beta",
        "self.own[heads] = beta or 0.5",
        STATE,
    ),
    Fault("betahook/state/state.py", "sum_dtype(device) if value.dtype == torch.float64 else None", "None", STATE),
    Fault(
        "betahook/models/classifiers.py",
        "known_otherwise, is_scripted, is_called",
        "known_otherwise, is_called",
        DISCOVERED,
    ),
    Fault("betahook/state/factors.py", "if made_of != self._made_of", "if self._made_of is None"),
    Fault("betahook/state/factors.py", "leaf.register_post_accumulate_grad_hook(move)", "pass"),
    Fault("betahook/state/factors.py", "gains.nan_to_num(), {}", "gains, {}"),
    Fault("betahook/state/factors.py", "        self._leaves.pop(layer, None)\n", "", SETTLED),
    Fault(
        "betahook/tap/recorder.py",
        "self.state.paused or self.refusal else leaf",
        "self.state.paused else leaf",
        SETTLED,
    ),
    Fault("betahook/tap/by_hand/sites.py", "FUNCTION if _is_of_function(code) else None", "None", LEFT_ALONE),
    Fault("betahook/tap/by_hand/sites.py", "inspect.unwrap(kind.forward)", "kind.forward", LEFT_ALONE),
    Fault("betahook/tap/by_hand/sites.py", "        yield from _subclasses(each)\n", "", LEFT_ALONE),
    Fault("betahook/tap/by_hand/forward.py", "self.plan.key_factors.get(site, of_key)", "of_key", FORMS),
    Fault("betahook/tap/by_hand/rearranging.py", "return operands[0]._replace(mixed", "return Operand(mixed", FORMS),
    Fault("betahook/tap/kernels.py", "if low > -queries else None", "", BANDS),
    Fault("betahook/tap/kernels.py", "if high < keys - 1 else None", "", BANDS),
    Fault("betahook/tap/kernels.py", "int(distances.min()) - 1", "int(distances.min())", BANDS),
    Fault(
        "betahook/tap/by_hand/softmaxes.py", "mask.pairs is None or plan.band is not None", "mask.pairs is None", BANDS
    ),
    Fault(
        "betahook/tap/by_hand/watching.py",
        "is_without_data()) and bool(layer.is_set.any())",
        "is_without_data()) and bool(layer.is_set[0])",
        SCALES,
    ),
    Fault("betahook/tap/by_hand/following.py", "forward.layer.is_set.to", "forward.layer.is_set[:1].to", SCALES),
    Fault("betahook/tap/by_hand/contraction.py", "if axis.heads_first else numbers.repeat(others)", "", SCALES),
    Fault("betahook/tap/by_hand/following.py", " and _is_same(target[index], source)", "", LEFT_ALONE),
    Fault("betahook/models/discovery.py", " and stated(module)[0] in (None, shown.size[0])", "", TRIAL),
    Fault("betahook/models/discovery.py", " or stated(module)[0] or is_named", " or is_named"),
    Fault("betahook/models/projections.py", "return not (normed or added)", "return not normed"),
    Fault(
        "betahook/models/code.py", "value.func if isinstance(value, functools.partial) else value", "value", DISCOVERED
    ),
    Fault("betahook/tap/by_hand/traces.py", "compat.is_transformed()", "False", TRANSFORMED),
    Fault(
        "betahook/tap/by_hand/plan.py", "return self.since.get(site, step) < step", "return site in self.since", SETTLED
    ),
    Fault("betahook/tap/by_hand/arithmetic.py", "hidden | (masked_by(tensor) & ~scores.pairs)", "hidden", POSITIONS),
    Fault(
        "betahook/tap/by_hand/plan.py",
        "return site in self.varying",
        "return not same_factor(before, now)",
        CHECKPOINTED,
    ),
    Fault("betahook/tap/by_hand/matrices.py", "layer.note_default(known.default)", "pass", SETTLED),
    Fault("betahook/tap/by_hand/matrices.py", "forward.plan.mixes |= any(", "any(", SETTLED),
    Fault("betahook/tap/gain.py", " or (product is not None and not product.settled)", "", SETTLED),
    Fault("betahook/tap/gain.py", "axis != query.dim() - 3 or ", ""),
    Fault("betahook/tap/gain.py", " and query.numel() <= SMALL", ""),
    Fault(
        "betahook/state/state.py",
        "(state.table, state.recent, state.window)",
        "(state.table, state.window)",
        "tests/unit/report/test_findings.py",
    ),
    Fault("betahook/measure/together.py", "self.query, self.key, self.given.tensor\n", "self.query, self.key, None\n"),
    Fault(
        "betahook/tap/recorder.py",
        " or compat.is_captured(query.device):",
        ":",
        "tests/unit/measure/test_together.py",
    ),
    Fault("betahook/measure/masks.py", "mask.is_inference() or compat.is_captured(mask.device)", "mask.is_inference()"),
    Fault(
        "betahook/step/stages.py",
        "@torch.inference_mode(False)  # its tensors could not be written to outside of it",
        "",
        HOOK,
    ),
    Fault("betahook/step/stages.py", "        _forget_nonfinite(state)\n", "", WINDOW),
    Fault("betahook/step/stages.py", "state.table.sum(0) * 0 != 0", "state.table.sum(0) == state.table.sum(0)", WINDOW),
    Fault("betahook/report/warnings.py", "min(first.values()) > 1", "max(first.values()) > 1", WINDOW),
    Fault("betahook/tap/recorder.py", " or compat.is_transformed()", "", TRANSFORMED),
    Fault("betahook/tap/recorder.py", "if compat.is_exporting():", "if False:", TRANSFORMED),
    Fault(
        "betahook/tap/by_hand/rearranging.py",
        "(beside := beside_unread(situation, scores[0], *traces))",
        "(beside := None)",
        LEFT_ALONE,
    ),
    Fault(
        "betahook/tap/by_hand/arithmetic.py",
        "(lost := beside_unread(situation, scores, trace))",
        "(lost := None)",
        LEFT_ALONE,
    ),
    Fault(
        "betahook/tap/by_hand/arithmetic.py", "return unless_unread(situation)", "return other(situation)", LEFT_ALONE
    ),
    Fault("betahook/tap/by_hand/contraction.py", "or output == per_query", "", TRACES),
    Fault(
        "betahook/tap/by_hand/softmaxes.py",
        "(product := hidden.behind(input, forward.nodes))",
        "(product := None)",
        LEFT_ALONE,
    ),
    Fault("betahook/tap/by_hand/hidden.py", "waiting += product.makers", "pass", LEFT_ALONE),
    Fault("betahook/tap/by_hand/matrices.py", "and not is_read and", "and", POSITIONS),
    Fault(
        "betahook/models/modes.py", "if compat.has_compiled() else nullcontext()", "if False else nullcontext()", TRIAL
    ),
    Fault("betahook/models/modes.py", '            part.fp32_precision = "ieee"\n', "            pass\n", MODES),
    Fault("betahook/models/modes.py", '    part.fp32_precision = "none"\n', "", MODES),
    Fault("betahook/rerun.py", "stack.enter_context(full_precision())", "pass", "tests/unit/keep/test_folding.py"),
    Fault(
        "betahook/tap/recorder.py",
        "if shared and state.factors",
        "if state.factors",
        "tests/models/test_cost.py::test_what_a_graph_measures_leaves_no_tensor_behind",
    ),
    Fault("betahook/models/modes.py", "self._users -= 1", "self._users = 0", MODES),
    Fault(
        "betahook/tap/by_hand/watching.py",
        "with uncompiled(), ScoreProducts(known):",
        "with ScoreProducts(known):",
        SCALES,
    ),
    Fault("betahook/models/classifiers.py", "for part in child.modules())", "for part in [child])", DISCOVERED),
    Fault("betahook/models/classifiers.py", "is nn.Module.__call__ else NO_ATTENTION", "is None else None", DISCOVERED),
    Fault("betahook/models/discovery.py", "if not hooked.isdisjoint(module.modules())", "if True", DISCOVERED),
    Fault("betahook/models/projections.py", "if left or not key_heads or heads % key_heads:", "if False:"),
    Fault("betahook/models/projections.py", "return of_query == heads * head_dim or", "return True or"),
    Fault(
        "betahook/tap/by_hand/watching.py",
        "if not unfollowed:",
        "if True:",
        f"{COMPILED}::test_a_softmax_that_comes_later_is_followed_outside",
    ),
    Fault(
        "betahook/tap/by_hand/softmaxes.py",
        "factor == 1 for factor",
        "True for factor",
        f"{COMPILED}::test_what_has_to_be_followed_stays_outside",
    ),
    Fault(
        "betahook/tap/compiled.py",
        "query.dim() == 4 and query.shape[1] == layer.heads",
        "True",
        f"{COMPILED}::test_a_layout_that_comes_later_is_looked_at_outside",
    ),
    Fault("betahook/tap/compiled.py", "Band(None, 0 if is_causal else None)", "Band()", COMPILED),
    Fault(
        "betahook/step/stages.py",
        "torch.compiler.reset()",
        "pass",
        f"{COMPILED}::test_what_is_compiled_before_any_forward_is_compiled_again",
    ),
    Fault(
        "betahook/tap/by_hand/plan.py",
        "self.broken_since < resets",
        "True",
        f"{COMPILED}::test_a_checkpoint_of_compiled_layers_runs_the_same_graph_again",
    ),
    Fault(
        "betahook/tap/opaque.py",
        "numbers)\n    if recorder.is_due() and not is_repeated(recorder):",
        "numbers)\n    if recorder.is_due():",
        f"{COMPILED}::test_a_checkpoint_of_compiled_layers_runs_the_same_graph_again",
    ),
    Fault("betahook/tap/opaque.py", " and not compat.is_exporting():", ":", EXPORTED),
    Fault("betahook/tap/recorder.py", "if not compat.is_transformed():", "if True:", TRANSFORMED),
    Fault(
        "betahook/tap/gain.py",
        " or compat.is_transformed():\n        return _times",
        ":\n        return _times",
        TRANSFORMED,
    ),
    Fault("betahook/tap/by_hand/forward.py", "compat.is_transformed() or self", "self", TRANSFORMED),
    Fault("betahook/tap/by_hand/following.py", "into.before if isinstance(into, Weights) else into", "into", TRACES),
    Fault("betahook/tap/by_hand/rearranging.py", "trace_of=lambda _: before", "trace_of=lambda _: trace", TRACES),
    Fault("betahook/tap/by_hand/forward.py", "(rehearsal and compat.is_transformed())", "False", TRANSFORMED),
    Fault(
        "betahook/tap/recorder.py",
        "leaf.detach().requires_grad_() if self.state.paused or self.refusal else leaf",
        "leaf",
        "tests/unit/tap/test_gain.py",
    ),
    Fault("betahook/state/factors.py", "torch.inference_mode(False), torch.no_grad()", "torch.no_grad()"),
    Fault("betahook/state/factors.py", "torch.where(beta.isnan(), 1.0, beta / own)", "beta / own", CHECKPOINT),
    Fault(
        "betahook/checkpoint/schema.py",
        "torch.stack([values[rows.index(row)] if row in rows else zero for row in expected])",
        "values",
        SCHEMA,
    ),
    Fault(
        "betahook/checkpoint/schema.py",
        'if {**defaults(type(controller)), **entry["options"]} != like["options"]',
        'if entry["options"] != like["options"]',
        SCHEMA,
    ),
    Fault("betahook/checkpoint/fingerprint.py", "entries.to(got.dtype), got", "entries, got"),
    Fault("betahook/checkpoint/pretrained.py", "state_dict.pop(prefix + NEEDS_RESTORE, None)", "pass", CHECKPOINT),
    Fault(
        "betahook/checkpoint/pretrained.py",
        "weights[NEEDS_RESTORE] = model.get_buffer(NEEDS_RESTORE)",
        "pass",
        CHECKPOINT,
    ),
    Fault(
        "integrations/trainer.py",
        "self._taking_marked.append(weakref.finalize(self, checkpoint.take_marked(model).remove))",
        "pass",
        of_trainer("the_mark_of_weights_without_beta_is_expected_where_a_run_goes_on", "test_checkpoints.py"),
    ),
    Fault("betahook/tap/last_call.py", " or depth > self._depth", ""),
    Fault(
        "betahook/tap/last_call.py",
        "if torch.compiler.is_compiling() else rebuilt",
        "if True else rebuilt",
        VERIFICATION,
    ),
    Fault("betahook/rerun.py", "rebuilt((args, kwargs), copy)", "(args, kwargs)", VERIFICATION),
    Fault("betahook/tap/last_call.py", "if module is not self.module:", "if False:"),
    Fault(
        "betahook/tap/by_hand/nested.py",
        "watched(*map(pick, args)",
        "forward(*map(pick, args)",
        "tests/unit/tap/by_hand/test_multihead_attention.py",
    ),
    Fault("betahook/checkpoint/fingerprint.py", "last * index // (ENTRIES - 1)", "0"),
    Fault("betahook/checkpoint/fingerprint.py", " and not compat.is_flattened(weight)", ""),
    Fault("betahook/checkpoint/file.py", "fingerprint.refuse_other_weights(self.entries, model)", "pass", FINGERPRINT),
    Fault("betahook/checkpoint/file.py", "path.with_suffix(f\".unfinished{rank or ''}\")", "path", FINGERPRINT),
    Fault("betahook/checkpoint/file.py", 'content.get("sha256") != _checksum(state, tensors)', "False", CHECKPOINT),
    Fault(
        "betahook/step/stages.py",
        "new != old, new *",
        "new > 0, new *",
    ),
    Fault("betahook/checkpoint/schema.py", "    forget_refused(state)\n", "", "tests/unit/test_hook_state.py"),
    Fault("betahook/control/decades.py", "if observation.batches > 0:", "if True:"),
    Fault("betahook/control/decades.py", "failed = ~observation.loss().isfinite()", "failed = torch.tensor(False)"),
    Fault("betahook/control/memory.py", " or SEPARATOR in name", ""),
    Fault("betahook/control/memory.py", " or not is_of_kind(value, like)", ""),
    Fault("betahook/control/memory.py", "value.shape != beta.shape or value.dtype", "value.dtype"),
    Fault("betahook/checkpoint/schema.py", "_check(is_of_kind(value, like),", "_check(True,", SCHEMA),
    Fault("betahook/checkpoint/schema.py", "int and heads >= 1", "int and heads > 1", SCHEMA),
    Fault(
        "betahook/checkpoint/schema.py",
        '_check(not unknown, f"{NEWER}: {name}',
        '_check(True, f"{NEWER}: {name}',
        SCHEMA,
    ),
    Fault("betahook/checkpoint/schema.py", "<= skipped <= steps < 2**53 and", "<= skipped <= steps and", SCHEMA),
    Fault(
        "betahook/tap/by_hand/forward.py", "self.layer.state.steps - self.rehearsal", "self.layer.state.steps", SETTLED
    ),
    Fault("integrations/reports.py", "if self._step != self._hook.steps:", "if True:"),
    Fault("integrations/reports.py", "if logs is not None and is_training(logs):", "if logs is not None:"),
    Fault("integrations/reports.py", "        self._undo.close()\n", ""),
    Fault("integrations/reports.py", "        send_alert(alert)\n", ""),
    Fault(
        "integrations/trainer.py",
        "            self._reports.close()\n        self._reports = (",
        "            pass\n        self._reports = (",
        "tests/unit/integrations/test_reports.py",
    ),
    Fault(
        "integrations/trainer.py",
        "hooks_of(model) & set(_training)",
        "hooks_of(model)",
        of_trainer("the_hook_of_a_training_that_was_broken_off_is_replaced", "test_further_trainings.py"),
    ),
    Fault(
        "integrations/checkpoints.py",
        "elif exported is not None:",
        "elif named and exported:",
        of_trainer("a_fork_of_a_run_ends_with_the_same_bits", "test_checkpoints.py"),
    ),
    Fault(
        "integrations/checkpoints.py",
        "_exports(state).pop(_EXPORT, None)",
        "pass",
        of_trainer("the_state_of_the_trainer_is_that_of_any_run_once_beta_is_folded", "test_checkpoints.py"),
    ),
    Fault("betahook/control/rules.py", "(1 - MARGIN) * self.threshold", "self.threshold * 1.01", CLIPPING),
    Fault("betahook/step/clipping.py", "healthy = measured & observed.finite", "healthy = observed.finite", CLIPPING),
    Fault("betahook/step/clipping.py", "if self._differs(hook, due):", "if False:", CLIPPING),
    Fault(
        "betahook/step/clipping.py",
        "for each in due:\n            each.is_checked",
        "for each in self._clipped:\n            each.is_checked",
        CLIPPING,
    ),
    Fault(
        "betahook/models/scaling.py",
        "key_heads == heads and not any(getattr(module, name, None) is not None for name in families.KEY_NORMS):",
        "key_heads == heads:",
    ),
    Fault("betahook/step/clipping.py", "clipped.choice = choice", "pass", CLIPPING),
    Fault("betahook/models/scaling.py", "+ self.offset * (factors - 1)", "", CLIPPING),
    Fault(
        "integrations/trainer.py",
        "or self.hook.steps == 0):",
        "or self.hook.steps < 0):",
        of_trainer("a_first_batch_that_did_not_fit_leaves_nothing", "test_further_trainings.py"),
    ),
    Fault("betahook/tap/by_hand/head_axes.py", "device=device_of(scores)", "device=scores.device", MASKS_OR_BIASES),
    Fault(
        "betahook/tap/by_hand/head_axes.py",
        "torch.where(labels == UNKNOWN, labels, labels % FAR)",
        "labels",
        "tests/unit/tap/by_hand/test_products_forms.py",
    ),
    Fault("betahook/tap/adapters.py", "state.beta.fill_(torch.nan)", "pass", ADAPTERS),
    Fault(
        "betahook/keep/places.py",
        "*added_queries(layer.module, layer.projections[0])",
        "",
        "tests/unit/tap/by_hand/test_products_forms.py",
    ),
    Fault("betahook/models/code.py", ", *_inherited(kind)]", "]", "tests/unit/models/test_discovery.py"),
    Fault("betahook/models/trial.py", "[LENGTH, *of_masks, *stated]", "[LENGTH]", "tests/unit/models/test_trial.py"),
    Fault("betahook/tap/adapters.py", "state.beta.copy_(kept)", "None", ADAPTERS),
    Fault("betahook/checkpoint/pretrained.py", "not compat.saves_adapters(model):", "False:", ADAPTERS),
    Fault(
        "betahook/compat.py", "if is_active_adapter(adapter) else {}", "if True else {}", "tests/unit/test_compat.py"
    ),
    Fault("betahook/keep/refusals.py", "found[0][1] and ", "", ADAPTERS),
    Fault(
        "betahook/tap/interface.py",
        "return layer.refusal is not None",
        "return False",
        "tests/unit/tap/test_interface.py::test_a_query_of_other_heads_than_a_module_states_is_left_alone",
    ),
    Fault(
        "betahook/tap/interface.py",
        "return not fits",
        "return False",
        "tests/unit/tap/test_interface.py::test_a_query_of_other_heads_than_a_module_states_is_left_alone",
    ),
    Fault("betahook/tap/last_call.py", '"cache", "past_key_values"', '"past_key_values", "past"'),
    Fault("betahook/tap/by_hand/forward.py", " or self.is_empty", "", "tests/unit/tap/by_hand/test_products_edges.py"),
    Fault("betahook/models/materialise.py", "with evaluating(module.parametrizations[name]):", "if True:"),
    Fault(
        "betahook/models/labels.py", 'torch.device("cpu") if tensor.is_meta else tensor.device', "tensor.device", TRIAL
    ),
    Fault("betahook/measure/rows.py", "sinks.expand(-1, -1, queries)", "sinks[..., :1].expand(-1, -1, queries)"),
    Fault("betahook/measure/pairs.py", "else of_rows(self.sinks)", "else self.sinks[..., rows]", ROWS),
    Fault("betahook/log.py", " and not logging.root.handlers", ""),
    Fault("betahook/log.py", "LOGGER.handlers == [self] and ", ""),
    Fault("betahook/__init__.py", "\nlog.name_warnings()", "", "tests/unit/test_log.py"),
    Fault("betahook/tap/by_hand/forward.py", "if leader.site in self.plan.ways or not", "if not", SCALES),
    Fault("betahook/tap/by_hand/forward.py", "leader.way = total / leader.prescale", "pass", SCALES),
    Fault("betahook/tap/by_hand/plan.py", "return self.ways[product.site] / math", "return math", SCALES),
    Fault("betahook/models/torch_calls.py", ' or self.kwargs.get("inplace") is True', "", SCALES),
    Fault("betahook/models/torch_calls.py", ' if name != "out"', "", LEFT_ALONE),
    Fault("betahook/tap/by_hand/following.py", "if call.has_target and any(", "if any([]) and any(", LEFT_ALONE),
    Fault("betahook/tap/by_hand/watching.py", "handler is not handlers.ignore and (", "(", SHADOWS),
    Fault("betahook/tap/by_hand/handlers.py", "for each in situation.traces) > 1", "for each in ()) > 1", LEFT_ALONE),
    Fault("betahook/tap/by_hand/head_axes.py", "reshape(size, -1).amax(1)", "flatten(1).amax(1)", LEFT_ALONE),
    Fault("betahook/models/classifiers.py", "has_softmax or re.search", "re.search"),
    Fault("betahook/cli/__init__.py", "path.is_dir() or ", "", "tests/unit/cli/test_main.py"),
    Fault("betahook/cli/terminal.py", 'errors="replace"', 'errors="strict"', "tests/unit/cli/test_main.py"),
    Fault(
        "integrations/trainer.py",
        "weakref.finalize(self, ",
        "weakref.finalize(type(self), ",
        of_trainer("a_trainer_that_never_trains_leaves_nothing_on_its_model", "test_trainer.py"),
    ),
    Fault(
        "integrations/trainer.py",
        "self._taking_marked.pop()()",
        "self._taking_marked.pop()",
        of_trainer("the_mark_of_weights_without_beta_is_expected_where_a_run_goes_on", "test_checkpoints.py"),
    ),
]
