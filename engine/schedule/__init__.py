"""What runs in each step: requests, admission, turns, lookahead. No torch."""
