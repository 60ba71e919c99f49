"""The scaler's loop, and the platforms that start its workers."""
