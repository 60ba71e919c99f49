"""leanq beside the trainers' real libraries, each in an environment of its own."""
