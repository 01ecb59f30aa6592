"""`megalith report`: what runs wrote of themselves as one HTML file that needs no network."""
