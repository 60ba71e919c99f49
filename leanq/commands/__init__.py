"""The commands of ``leanq``, each in a file of its name; ``options`` and ``common`` have shared
parts."""
