"""Takes the documents' pictures of dashboards, which show the data of real runs."""
