"""The commands of ``leanq``, each in a file of its name or of its kind."""
