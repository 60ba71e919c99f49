"""Observes and sizes the fleet: statistics, history, metrics, logs, the scaler."""
