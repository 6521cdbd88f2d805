package e2e

import (
	"os"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

func TestMain(m *testing.M) {
	lab.BeProcess()
	os.Exit(m.Run())
}
