"""Full-size recipes from the papers, and recipes that only studies use."""
