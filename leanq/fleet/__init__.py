"""The fleet observed and sized: statistics, history, metrics, logs, the scaler."""
