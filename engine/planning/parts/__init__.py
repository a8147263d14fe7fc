"""One module per section of the training plan: each makes its part of the document, and says why in the notes.
Nothing here touches a node or a file."""
