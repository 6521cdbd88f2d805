package lab

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Snapshot is what a namespace, or a node, looks like: sorted lines, each beginning with what it is about ("link",
// "address", "route", "rule", "neighbour", "qdisc", "filter", "tcx", "sysctl", "file"). Two are compared with go-cmp.
type Snapshot []string

// Only returns the lines about the given things.
func (s Snapshot) Only(about ...string) Snapshot {
	return slices.DeleteFunc(slices.Clone(s), func(line string) bool {
		what, _, _ := strings.Cut(line, " ")
		return !slices.Contains(about, what)
	})
}

// Without returns the lines that contain none of the given texts.
func (s Snapshot) Without(texts ...string) Snapshot {
	return slices.DeleteFunc(slices.Clone(s), func(line string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(line, text) })
	})
}

// Snapshot describes the node's network and all its files.
func (n *Node) Snapshot() (Snapshot, error) {
	lines, err := n.Namespace.Snapshot()
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{n.bpffsMount(), n.StateDir(), n.ConfDir(), n.CNIBinDir()} {
		files, err := describeFiles(dir)
		if err != nil {
			return nil, fmt.Errorf("snapshot of %s: %w", n.Name, err)
		}
		lines = append(lines, files...)
	}
	slices.Sort(lines)
	return lines, nil
}

// Snapshot describes links, addresses, routes of all tables, rules, permanent neighbours, qdiscs, filters, tcx programs
// and every readable network sysctl of the namespace. A link that vanishes meanwhile is said to be gone.
func (ns *Namespace) Snapshot() (lines Snapshot, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("snapshot of %s: %w", ns.name, err)
		}
	}()
	links, err := RetryInterrupted(ns.nl.LinkList)
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, part := range []func() (Snapshot, error){
		func() (Snapshot, error) { return ns.describeLinks(links, names) },
		func() (Snapshot, error) { return ns.describeRoutes(names) },
		func() (Snapshot, error) { return ns.describeTC(links, names) },
		func() (Snapshot, error) { return ns.describeTCX(links) },
		ns.describeSysctls,
	} {
		more, err := part()
		if err != nil {
			return nil, err
		}
		lines = append(lines, more...)
	}
	slices.Sort(lines)
	return lines, nil
}

func (ns *Namespace) describeLinks(links []netlink.Link, names map[int]string) (lines Snapshot, err error) {
	for _, l := range links {
		a := l.Attrs()
		lines = append(lines, fmt.Sprintf("link %s %s %s mtu %d master %q flags %s", a.Name, l.Type(), a.HardwareAddr, a.MTU, names[a.MasterIndex], a.Flags))
		addrs, err := RetryInterrupted(func() ([]netlink.Addr, error) { return ns.nl.AddrList(l, netlink.FAMILY_ALL) })
		if err != nil {
			return nil, fmt.Errorf("list addresses of %s: %w", a.Name, err)
		}
		for _, addr := range addrs {
			lines = append(lines, fmt.Sprintf("address %s %s scope %d", a.Name, addr.IPNet, addr.Scope))
		}
		neighbours, err := RetryInterrupted(func() ([]netlink.Neigh, error) { return ns.nl.NeighList(a.Index, netlink.FAMILY_ALL) })
		if err != nil {
			return nil, fmt.Errorf("list neighbours of %s: %w", a.Name, err)
		}
		for _, neighbour := range neighbours {
			if neighbour.State&netlink.NUD_PERMANENT != 0 {
				lines = append(lines, fmt.Sprintf("neighbour %s %s %s", a.Name, neighbour.IP, neighbour.HardwareAddr))
			}
		}
	}
	return lines, nil
}

func (ns *Namespace) describeRoutes(names map[int]string) (lines Snapshot, err error) {
	routes, err := RetryInterrupted(func() ([]netlink.Route, error) {
		return ns.nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		lines = append(lines, fmt.Sprintf("route table %d %s type %d via %s dev %q src %s protocol %d scope %d metric %d mtu %d",
			r.Table, r.Dst, r.Type, r.Gw, names[r.LinkIndex], r.Src, r.Protocol, r.Scope, r.Priority, r.MTU))
	}
	rules, err := RetryInterrupted(func() ([]netlink.Rule, error) { return ns.nl.RuleList(netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	for _, rule := range rules {
		lines = append(lines, fmt.Sprintf("rule family %d %v", rule.Family, rule))
	}
	return lines, nil
}

func (ns *Namespace) describeTC(links []netlink.Link, names map[int]string) (lines Snapshot, err error) {
	qdiscs, err := RetryInterrupted(func() ([]netlink.Qdisc, error) { return ns.nl.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	clsact := map[int]bool{}
	for _, q := range qdiscs {
		a := q.Attrs()
		clsact[a.LinkIndex] = clsact[a.LinkIndex] || q.Type() == "clsact"
		lines = append(lines, fmt.Sprintf("qdisc %s %s %s", names[a.LinkIndex], q.Type(), netlink.HandleStr(a.Parent)))
	}
	for _, l := range links {
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			if !clsact[l.Attrs().Index] {
				continue
			}
			filters, err := RetryInterrupted(func() ([]netlink.Filter, error) { return ns.nl.FilterList(l, parent) })
			if err != nil {
				return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
			}
			for _, f := range filters {
				line := fmt.Sprintf("filter %s %s %s priority %d", l.Attrs().Name, netlink.HandleStr(parent), f.Type(), f.Attrs().Priority)
				if bpf, ok := f.(*netlink.BpfFilter); ok {
					line += " " + bpf.Name
				}
				lines = append(lines, line)
			}
		}
	}
	return lines, nil
}

func (ns *Namespace) describeTCX(links []netlink.Link) (lines Snapshot, err error) {
	err = ns.Do(func() error {
		for _, l := range links {
			for name, attach := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
				result, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: attach})
				if errors.Is(err, unix.EINVAL) {
					return nil // Linux before 6.6 does not know what is asked for
				}
				if errors.Is(err, unix.ENODEV) {
					lines = append(lines, fmt.Sprintf("tcx %s %s gone", l.Attrs().Name, name))
					continue
				}
				if err != nil {
					return fmt.Errorf("query tcx %s of %s: %w", name, l.Attrs().Name, err)
				}
				for i, program := range result.Programs {
					lines = append(lines, fmt.Sprintf("tcx %s %s number %d %s", l.Attrs().Name, name, i, programName(program.ID)))
				}
			}
		}
		return nil
	})
	return lines, err
}

func programName(id ebpf.ProgramID) string {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err.Error()
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return err.Error()
	}
	return info.Name
}

// describeSysctls reads what can be read below /proc/sys/net but counters that change by themselves.
func (ns *Namespace) describeSysctls() (lines Snapshot, err error) {
	err = ns.Do(func() error {
		return filepath.WalkDir("/proc/sys/net", func(path string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // an interface that goes meanwhile takes its sysctls along
			}
			if err != nil || entry.IsDir() || entry.Name() == "nf_conntrack_count" {
				return err
			}
			if value, err := os.ReadFile(path); err == nil {
				lines = append(lines, fmt.Sprintf("sysctl %s = %s", strings.TrimPrefix(path, "/proc/sys/"), strings.TrimSpace(string(value))))
			}
			return nil
		})
	})
	return lines, err
}

// describeFiles lists what is below a directory with modes, and the content of regular files by hash. Of a directory
// that does not exist there are no lines.
func describeFiles(dir string) (lines Snapshot, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if filepath.Base(filepath.Dir(path)) == "holders" { // of the node's lock, at this moment
			return nil
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		line := fmt.Sprintf("file %s %s", path, info.Mode())
		// Pins say that they are regular files of no length, and cannot be read. The agent's record of its programs has
		// their IDs, which are others after each load.
		if info.Mode().IsRegular() && info.Size() > 0 && entry.Name() != "programs.json" {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" sha256 %.8x", sha256.Sum256(content))
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	return lines, nil
}
