"""Statistics of attention: pure functions of tensors, without N x N matrices and without reading the device back."""
