package attach

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Place is a hook of an interface; Ifindex is 0 for those of sockets.
type Place struct {
	Ifindex int
	Hook    Hook
}

// Compare sorts by interface, then by hook.
func (p Place) Compare(o Place) int {
	return cmp.Or(cmp.Compare(p.Ifindex, o.Ifindex), cmp.Compare(p.Hook, o.Hook))
}

// PinnedLinks lists the places of the pinned tcx links, not those of sockets.
func PinnedLinks(dir bpffs.Dir) (places []Place, err error) {
	files, err := os.ReadDir(dir.Links())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list pinned links: %w", err)
	}
	for _, f := range files {
		if hook, ifindex, ok := bpffs.ParseLink(f.Name()); ok {
			places = append(places, Place{ifindex, Hook(hook)})
		}
	}
	return places, nil
}
