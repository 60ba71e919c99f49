"""The scaler's loop, and the platforms that it orders workers from."""
