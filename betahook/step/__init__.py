"""The stages of `Hook.step`, which runs once per optimizer step, and what they need to know about the loss."""
