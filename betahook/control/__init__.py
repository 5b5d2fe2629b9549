"""Controllers: an observation in, a beta out."""
