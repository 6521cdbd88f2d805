package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// RemoveOrphans removes what belongs to no endpoint: host-side links of killed ADDs, entries and pins of links that are
// gone, temporary files. A link without a state file is an orphan unless keep has its attachment or the endpoints
// map leads to it (then it is a complete endpoint whose file was lost). The caller holds bpffs.Exclusive: an ADD
// that is under way looks just like one that was killed.
func (r Releaser) RemoveOrphans(keep map[ID]bool) error {
	n, err := r.Open()
	if err != nil {
		return fmt.Errorf("remove orphans: %w", err)
	}
	defer n.Close()
	if err = n.openTables(false); err == nil {
		err = errors.Join(n.removeTemporary(), n.removeOrphanLinks(keep), n.removeDead(context.Background()))
	}
	if err != nil {
		return fmt.Errorf("remove orphans: %w", err)
	}
	return nil
}

func (n *Node) removeTemporary() error {
	files, err := os.ReadDir(Dir(n.StateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for _, f := range files {
		if strings.HasSuffix(f.Name(), suffix+tempSuffix) {
			errs = append(errs, os.Remove(filepath.Join(Dir(n.StateDir), f.Name())))
		}
	}
	return errors.Join(errs...)
}

// removeOrphanLinks removes links that belong to no endpoint, and entries of the endpoints map that lead to a link that
// is gone and in no state file.
func (n *Node) removeOrphanLinks(keep map[ID]bool) error {
	known, err := n.knownNames(keep)
	if err != nil {
		return err
	}
	complete, err := n.ByLink()
	if err != nil {
		return err
	}
	links, err := n.links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if l.Kind == "veth" && IsHostLinkName(l.Name) && !known[l.Name] && len(complete[l.Index]) == 0 {
			n.log().Info("orphaned link deleted", "link", l.Name, "ifindex", l.Index)
			errs = append(errs, n.Host.DeleteLink(l.Index))
		}
	}
	list, err := List(n.StateDir)
	if err != nil { // a file that can't be read may have them
		n.log().Warn("endpoints entries of links that are gone kept, because some state files are unreadable", "error", err)
		return errors.Join(errs...)
	}
	for index, addresses := range complete {
		_, there := links[index]
		if !there && !slices.ContainsFunc(list, func(e Endpoint) bool { return e.HostIndex == index }) {
			errs = append(errs, forAll(addresses, func(a netip.Addr) error { return n.forgetAddress(a, []int{index}) }))
		}
	}
	return errors.Join(errs...)
}

// knownNames are the names of links that endpoints have or should have. They follow from the names of the state files.
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

// removeDead removes the pins, devices entries and host ports of links that are gone. It may run at the same time as an ADD, since it
// lists them before the links, and an ADD creates its link first.
func (n *Node) removeDead(ctx context.Context) error {
	pinned, err := attach.PinnedLinks(n.Pins)
	if err != nil {
		return err
	}
	var listed []int
	if n.Devices != nil {
		for e, err := range n.Devices.All() {
			if err != nil {
				return err
			}
			listed = append(listed, int(e.Key.Ifindex))
		}
	}
	ports, err := n.hostPortsOf(func(int) bool { return true })
	if err != nil {
		return err
	}
	links, err := n.links()
	if err != nil {
		return err
	}
	ports = slices.DeleteFunc(ports, func(e hostPortEntry) bool {
		_, there := links[int(e.Value.Ifindex)]
		return there
	})
	errs := []error{n.forgetHostPorts(ctx, ports)}
	for _, index := range listed {
		if _, there := links[index]; !there {
			errs = append(errs, n.forgetDevice(index))
		}
	}
	for _, p := range pinned {
		if _, there := links[p.Ifindex]; !there {
			n.log().Info("program of a link that is gone unpinned", "ifindex", p.Ifindex)
			errs = append(errs, attach.Attacher{Dir: n.Pins}.Detach(p.Ifindex, p.Hook))
		}
	}
	return errors.Join(errs...)
}

// links are all links by index.
func (n *Node) links() (map[int]device.Link, error) {
	list, err := n.Host.Links()
	all := make(map[int]device.Link, len(list))
	for _, l := range list {
		all[l.Index] = l
	}
	return all, err
}
