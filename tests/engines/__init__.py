"""What is deployed, on real engines: ``make image-test`` and ``make k8s-test``."""
