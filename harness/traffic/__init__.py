"""What is sent and when: arrivals, lengths, prompts, traces, and the schedule made of them."""
