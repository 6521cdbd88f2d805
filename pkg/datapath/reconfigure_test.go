package datapath

import (
	"context"
	"os"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// The new programs use the maps that run, also where somebody has removed a pin.
func TestReconfigureKeepsMapsWithoutPins(t *testing.T) {
	opts := isolated(t, attach.Auto)
	dp := mustLoad(t, opts)
	key, want := endpoints.Key{Address: addr("10.244.1.9")}, endpoints.Value{Ifindex: 7}
	check(t, dp.Maps.Endpoints.Put(key, want))
	check(t, os.Remove(opts.Dir.Map(endpoints.Name)))
	opts.NodeConfig.NetfilterNat = config.Translates
	check(t, dp.Reconfigure(context.Background(), opts.NodeConfig, false))
	pinned, err := endpoints.Open(opts.Dir.Map(endpoints.Name))
	check(t, err)
	defer pinned.Close()
	if got, err := pinned.Get(key); err != nil || got != want {
		t.Errorf("the pinned map has %+v, error %v; want %+v", got, err, want)
	}
}
