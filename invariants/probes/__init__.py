"""What ranks measure, and how a one-rank world compares it with a reference; never imported by the controller."""
