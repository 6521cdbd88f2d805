package endpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// Sweep takes away what belongs to no endpoint: host-side links of killed ADDs, entries and pins of links that are
// gone, temporary files. A link without a state file is an orphan unless keep names its attachment or the endpoints
// map leads to it (then it is a complete endpoint whose file was lost). The caller holds bpffs.Exclusive: an ADD
// that is under way looks just like one that was killed.
func (r Releaser) Sweep(keep map[ID]bool) error {
	host, err := device.Open()
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	defer host.Close()
	t, err := openTables(r.Pins)
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	defer t.close()
	err = errors.Join(r.sweepTemporary(), r.sweepLinks(host, t, keep), r.sweepDead(host, t), r.sweepEndpoints(host, t))
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	return nil
}

func (r Releaser) sweepTemporary() error {
	files, err := os.ReadDir(Dir(r.StateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for _, f := range files {
		if strings.HasSuffix(f.Name(), suffix+tempSuffix) {
			errs = append(errs, os.Remove(filepath.Join(Dir(r.StateDir), f.Name())))
		}
	}
	return errors.Join(errs...)
}

func (r Releaser) sweepLinks(host *device.Handle, t *tables, keep map[ID]bool) error {
	known, err := r.knownNames(keep)
	if err != nil {
		return err
	}
	complete, err := t.endpointIndexes()
	if err != nil {
		return err
	}
	links, err := host.Links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if l.Kind != "veth" || !IsHostLinkName(l.Name) || known[l.Name] || len(complete[l.Index]) > 0 {
			continue
		}
		r.log().Info("orphaned link deleted", "link", l.Name, "ifindex", l.Index)
		errs = append(errs, host.DeleteLink(l.Index))
	}
	return errors.Join(errs...)
}

// knownNames are the links that endpoints have or should have. A file that can't be read still names its endpoint.
func (r Releaser) knownNames(keep map[ID]bool) (map[string]bool, error) {
	files, err := os.ReadDir(Dir(r.StateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	known := map[string]bool{}
	for _, f := range files {
		if link, ok := linkOfFile(f.Name()); ok {
			known[link] = true
		}
	}
	for id := range keep {
		known[id.HostLinkName()] = true
	}
	return known, nil
}

// sweepDead removes the pins and the devices entries of links that are gone. It may run beside an ADD: it lists them
// before it lists the links, and an ADD makes its link first.
func (r Releaser) sweepDead(host *device.Handle, t *tables) error {
	pinned, err := pinnedIndexes(r.Pins)
	if err != nil {
		return err
	}
	listed, err := t.deviceIndexes()
	if err != nil {
		return err
	}
	alive, err := linkIndexes(host)
	if err != nil {
		return err
	}
	var errs []error
	for _, index := range listed {
		if !alive[index] {
			errs = append(errs, t.forgetDevice(index))
		}
	}
	for _, index := range pinned {
		if !alive[index] {
			r.log().Info("program of a link that is gone unpinned", "ifindex", index)
			errs = append(errs, attach.Attacher{Dir: r.Pins}.Detach(index, attach.FromPod))
		}
	}
	return errors.Join(errs...)
}

// sweepEndpoints removes entries of the endpoints map that lead to a link that is gone and that no state file claims.
func (r Releaser) sweepEndpoints(host *device.Handle, t *tables) error {
	byIndex, err := t.endpointIndexes()
	if err != nil {
		return err
	}
	alive, err := linkIndexes(host)
	if err != nil {
		return err
	}
	list, err := List(r.StateDir)
	if err != nil { // one of the files that can't be read may claim them
		r.log().Warn("map entries not swept", "error", err)
		return nil
	}
	var errs []error
	for index, addresses := range byIndex {
		if alive[index] || slices.ContainsFunc(list, func(e Endpoint) bool { return e.HostIndex == index }) {
			continue
		}
		for _, a := range addresses {
			errs = append(errs, t.forgetAddress(a, []int{index}))
		}
	}
	return errors.Join(errs...)
}

func linkIndexes(host *device.Handle) (map[int]bool, error) {
	links, err := host.Links()
	if err != nil {
		return nil, err
	}
	alive := map[int]bool{}
	for _, l := range links {
		alive[l.Index] = true
	}
	return alive, nil
}

func pinnedIndexes(pins bpffs.Dir) ([]int, error) {
	files, err := os.ReadDir(pins.Links())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var found []int
	for _, f := range files {
		if hook, index, ok := bpffs.ParseLink(f.Name()); ok && attach.Hook(hook) == attach.FromPod {
			found = append(found, index)
		}
	}
	return found, nil
}
