"""What people and machines read: text on a terminal, JSON documents, signs of life."""
