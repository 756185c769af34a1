"""What the host keeps of requests: input processing, scheduling, slots, KV blocks, the draft policy, and commit of outcomes."""
