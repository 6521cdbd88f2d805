package datapath

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

// TestAnOlderBuildIsRefusedBeforeItChangesAnything has the build of before meet a node on which a record has grown, of one map of each
// kind. Of what the newer one has no map for, nothing is made; what an upgrade of it that was killed has left stays for the next
// one. A map that would begin empty anyway is made anew.
func TestAnOlderBuildIsRefusedBeforeItChangesAnything(t *testing.T) {
	for _, d := range []typed.Definition{endpoints.Definition, config.Definition, snat.Reverse, drops.Definition, fragments.Definition} {
		t.Run(d.Name, func(t *testing.T) {
			n := newNode(t, isolated(t, attach.Auto))
			older := n.opts
			n.opts.Spec = stubs(t)
			grow(n.opts.Spec, d.Name, 16)
			mustLoad(t, n.opts)
			for _, other := range registry.Pinned() {
				if other.Name != d.Name && other.Content == d.Content { // of any kind
					check(t, os.Remove(n.opts.Dir.Map(other.Name)))
					break
				}
			}
			left, err := ebpf.LoadPinnedProgram(n.opts.Dir.Program("ec_from_pod"), nil)
			check(t, err)
			defer left.Close()
			check(t, os.MkdirAll(migrate.Dir(n.opts.Dir), 0o700))
			check(t, left.Pin(migrate.Path(n.opts.Dir, "ec_from_pod")))
			before, attached := n.pins(t), n.attached(t)
			dp, err := Load(t.Context(), older)
			if err == nil {
				check(t, dp.Close())
				if d.Name != fragments.Name {
					t.Fatal("it was not refused")
				}
				return
			}
			if !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), "map "+d.Name) {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, n.pins(t)); diff != "" {
				t.Errorf("pins (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(attached, n.attached(t)); diff != "" {
				t.Errorf("attachments (-before +after):\n%s", diff)
			}
		})
	}
}
