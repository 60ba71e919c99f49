"""Lean: environments, drivers, and what runs beside a candidate."""
