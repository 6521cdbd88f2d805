package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// settleLimit is how long it may take until a node's records are those of its living pods: longer than the agent needs to
// miss a pod twice.
const settleLimit = time.Minute

// balanced waits until nobody but the living pods of a node has an address there: in the programs' map, in the state
// files, in the store of addresses.
func balanced(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	started := time.Now()
	err := cluster.Poll(within(t, settleLimit), "only living pods have addresses on "+node.Name, func(ctx context.Context) error {
		want, err := s.podsOn(ctx, node)
		if err != nil {
			return err
		}
		var wrong []error
		for keeper, has := range map[string][]netip.Addr{
			"the map of endpoints": endpoints(t, s, node), "the state files": recorded(t, node), "the store of addresses": reserved(t, s, node),
		} {
			if !slices.Equal(has, want) {
				wrong = append(wrong, fmt.Errorf("%s: too many %v, missing %v", keeper, without(has, want), without(want, has)))
			}
		}
		return errors.Join(wrong...)
	})
	if err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took > time.Second {
		t.Logf("the records of %s were those of its pods after %.1f s", node.Name, took.Seconds())
	}
}

func without(all, those []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return slices.Contains(those, a) })
}

// recorded are the addresses in a node's state files, in order. One that vanishes before it is read is none.
func recorded(t *testing.T, node *cluster.Machine) []netip.Addr {
	t.Helper()
	const read = `find /run/ebpf-cni/endpoints -name '*.json' -exec sh -c 'for file; do cat "$file" 2>/dev/null || [ ! -e "$file" ] || exit 1; done' sh {} +`
	out, err := node.Run(t.Context(), "sh", "-ec", read)
	if err != nil {
		t.Fatal(err)
	}
	var all []netip.Addr
	for records := json.NewDecoder(strings.NewReader(out)); ; {
		var record struct{ Addresses []netip.Addr }
		err := records.Decode(&record)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || len(record.Addresses) == 0 {
			t.Fatalf("a state file of %s without addresses, error %v:\n%s", node.Name, err, out)
		}
		all = append(all, record.Addresses...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// reserved are the addresses that a node's store has given to somebody, in order.
func reserved(t *testing.T, s *standing, node *cluster.Machine) []netip.Addr {
	t.Helper()
	var all []netip.Addr
	for _, record := range dump(t, s, node, "ipam") {
		text, _ := record["address"].(string)
		addr, err := netip.ParseAddr(text)
		if err != nil {
			t.Fatalf("an address in the store of %s: %v: %v", node.Name, err, record)
		}
		// One that rests is nobody's.
		if record["state"] != "quarantined" {
			all = append(all, addr)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}
