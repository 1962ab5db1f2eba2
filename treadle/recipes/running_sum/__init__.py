"""An agent that keeps a running total: sums that reasoning-gym makes, read out term by term, with a calculator."""
