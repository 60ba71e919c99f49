"""Campaigns: whole data sets, checked by a coordinator that may die at any time.

A campaign reads rows (``rows``), sends what they hold through leanq with a bounded window
(``coordinator``), and keeps what came back in a journal beside its results (``journal``), which is
also its cursor. It runs at once, or as a job of RQ (``jobs``).
"""
