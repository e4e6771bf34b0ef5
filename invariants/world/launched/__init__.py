"""Worlds under a launcher: torchrun, srun or mpirun has started one pytest a rank, on one machine or several.

Rank 0's is the controller: it runs the tests. The others run none; each is an agent that forks, on its own machine and
beside its own device, the ranks that the controller asks for, and says what became of them. So a rank that crashes or
hangs is replaced as it is on one machine, and only the loss of a launched process ends the session.
"""
