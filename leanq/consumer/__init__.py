"""What stands below the worker: requests claimed, run in slots, and settled."""
