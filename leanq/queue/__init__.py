"""The queue in Redis: requests, replies, leases, and the scripts that move them."""
