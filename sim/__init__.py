"""The scaler's proof: fleets in simulated time, under its laws and others."""
