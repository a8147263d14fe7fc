"""From facts to what a launch needs: the backend, the addresses, the hostfile. Nothing here touches a node: facts come
in, decisions with their reasons go out."""
