"""Statistics of attention without N x N matrices: functions of tensors, and what waits for other calls to be measured.

Only `correlations`, for the audit, reads the device back.
"""
