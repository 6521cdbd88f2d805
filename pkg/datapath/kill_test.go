package datapath

const childStep = "ECDP_CHILD_STEP"

func child() int { return 2 }
