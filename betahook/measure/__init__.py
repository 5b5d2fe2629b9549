"""Statistics of attention without N x N matrices: functions of tensors, and a queue of calls to be measured as one.

Only `correlations`, for the audit, reads the device back.
"""
