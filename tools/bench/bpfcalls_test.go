package main

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// The calls by which this process writes maps are counted, and no others.
func TestBPFCalls(t *testing.T) {
	priv.Require(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for pid, want := range map[int]float64{os.Getpid(): 3, os.Getppid(): 0} {
		c, err := countBPFCalls(pid)
		if err != nil {
			t.Fatal(err)
		}
		calls, err := c.during(func() (err error) {
			for i := range uint32(3) {
				var value uint32
				err = errors.Join(err, m.Put(uint32(0), i), m.Lookup(uint32(0), &value))
			}
			return err
		})
		if err != nil || calls != want {
			t.Errorf("process %d: %.0f calls that write maps, error %v; want %.0f", pid, calls, err, want)
		}
		if err := c.close(); err != nil {
			t.Error(err)
		}
	}
}
