"""Facts about models: which modules are attention, and where their W_q and W_k are."""
