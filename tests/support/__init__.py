"""What tests share: servers, fleets, stand-ins, models, checkers."""
