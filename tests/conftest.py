import hypothesis
import pytest
import torch
import transformers
from packaging.version import Version

OLDEST = {
    "t5": "T5 writes its attention by hand, and has no sdpa",
    "an_encoder_decoder": "T5 writes its attention by hand",
    "a_layer_that_was_not_used": "T5 writes its attention by hand",
    "half_of_beta_is_half_of_the_query[gpt2-eager]": "GPT-2 passes no scaling that the test could change",
    "one_graph_serves_every_beta": "torch cannot trace the models at all",
    "compiled_checkpointing": "torch cannot trace the models at all",
    "a_compiled_model_folds": "torch cannot trace the models at all",
    "cuda_graphs_know": "torch cannot trace the models at all",
    "two_processes_reduce": "a rank may hang when the other has left",
    "test_distributed.py": "FSDP 2 does not run on a CPU",
    "test_families_that_write_their_attention": "the zoo reads configs that are dataclasses",
    "the_rows_of_a_fused_projection": "the zoo reads configs that are dataclasses",
    "test_fold_zoo.py": "the zoo reads configs that are dataclasses",
}
"""What cannot be tested with torch 2.6 and transformers 5.1, by a part of the test's name."""

pytest.register_assert_rewrite("matrices")  # whose assertions are to show their values too

hypothesis.settings.register_profile("repeatable", derandomize=True)  # a change is judged by the same examples
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run in parallel processes; threads would only get in each other's way."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if Version(transformers.__version__) >= Version("5.2"):
        return
    for item in items:
        reason = next((reason for part, reason in OLDEST.items() if part in item.nodeid), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"{reason} in the oldest versions"))
