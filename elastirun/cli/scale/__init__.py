"""The command ``elastirun scale``: a wanted number of nodes, from outside of the job."""
