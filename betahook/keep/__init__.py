"""Keep a trained beta beyond the process: `fold` it into the weights, or `restore` it from a saved folder."""
