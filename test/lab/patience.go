package lab

import (
	"os"
	"strconv"
	"time"
)

// Patience is how long to wait for what takes a limit on an ordinary machine: $EBPF_CNI_PATIENCE times as long. Emulated
// processors need it.
func Patience(limit time.Duration) time.Duration {
	if times, err := strconv.Atoi(os.Getenv("EBPF_CNI_PATIENCE")); err == nil && times > 0 {
		return limit * time.Duration(times)
	}
	return limit
}
