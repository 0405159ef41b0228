"""What is right, and how wrong a result may be."""
