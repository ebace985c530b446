"""Reports for people: an HTML page and a Markdown summary of one step's run, and a summary of the whole run."""
