"""One optimizer step, seen by the hook: the stages of `Hook.step`, and what they need to know of the loss."""
