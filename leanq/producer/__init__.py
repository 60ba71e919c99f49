"""What stands below the clients: requests built, sent, and their replies awaited."""
