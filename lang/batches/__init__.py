"""What a batch keeps in files: finished items and their results, to be read by people and by a later run."""
