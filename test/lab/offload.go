package lab

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// offloads are the switches that SetOffloads turns, each with the kernel's names for it. Merging of datagrams for others is off
// unless somebody turns it on.
var offloads = map[string][]string{
	"rx checksum": {"rx-checksum"},
	"tx checksum": {"tx-checksum-ip-generic"},
	"TSO":         {"tx-tcp-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation", "tx-tcp6-segmentation"},
	"UDP GSO":     {"tx-udp-segmentation"},
	"GSO":         {"tx-generic-segmentation"},
	"GRO":         {"rx-gro"},
	"UDP GRO":     {"rx-udp-gro-forwarding"},
}

// Offloads are the names of all switches, in the order in which a packet meets them.
var Offloads = []string{"tx checksum", "TSO", "UDP GSO", "GSO", "rx checksum", "GRO", "UDP GRO"}

// SetOffloads turns checksum and segmentation offloads of a link on or off: those that are named, or all. What a kind of link lacks stays off.
func (ns *Namespace) SetOffloads(link string, on bool, names ...string) error {
	if len(names) == 0 {
		names = Offloads
	}
	var wanted []string
	for _, name := range names {
		wanted = append(wanted, offloads[name]...)
	}
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return ethtool{fd, link}.setFeatures(wanted, on)
	})
	if err != nil {
		return fmt.Errorf("set %q of %s in %s to %v: %w", names, link, ns.name, on, err)
	}
	return nil
}

// ethtool asks the kernel about one link.
type ethtool struct {
	socket int
	link   string
}

// ethtoolRequest is the kernel's struct ifreq as SIOCETHTOOL reads it.
type ethtoolRequest struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

func (e ethtool) call(data unsafe.Pointer) error {
	request := ethtoolRequest{data: data}
	copy(request.name[:unix.IFNAMSIZ-1], e.link)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(e.socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}

// mostFeatures is more than any kernel has.
const mostFeatures = 512

// features are the kernel's names of all features, by their numbers.
func (e ethtool) features() ([]string, error) {
	const setOfFeatures = 4 // ETH_SS_FEATURES
	// The kernel's struct ethtool_gstrings.
	list := struct {
		command, set, count uint32
		names               [mostFeatures][32]byte
	}{command: unix.ETHTOOL_GSTRINGS, set: setOfFeatures}
	if err := e.call(unsafe.Pointer(&list)); err != nil {
		return nil, err
	}
	var names []string
	for _, raw := range list.names[:list.count] {
		name, _, _ := bytes.Cut(raw[:], []byte{0})
		names = append(names, string(name))
	}
	return names, nil
}

func (e ethtool) setFeatures(wanted []string, on bool) error {
	all, err := e.features()
	if err != nil {
		return err
	}
	// The kernel's struct ethtool_sfeatures.
	change := struct {
		command, size uint32
		blocks        [mostFeatures / 32]struct{ valid, requested uint32 }
	}{command: unix.ETHTOOL_SFEATURES, size: uint32(len(all)+31) / 32}
	found := 0
	for i, name := range all {
		for _, one := range wanted {
			if name != one {
				continue
			}
			found++
			change.blocks[i/32].valid |= 1 << (i % 32)
			if on {
				change.blocks[i/32].requested |= 1 << (i % 32)
			}
		}
	}
	if found != len(wanted) {
		return errors.New("this kernel has them by other names")
	}
	return e.call(unsafe.Pointer(&change))
}

// SetMaxSizes sets how large GSO and GRO packets may be (BIG TCP), on all links of all hosts and pods that have that setting.
func (l *Lab) SetMaxSizes(size int) error {
	for _, ns := range l.Namespaces() {
		links, err := RetryInterrupted(ns.nl.LinkList)
		if err != nil {
			return fmt.Errorf("list links of %s: %w", ns.name, err)
		}
		for _, link := range links {
			for _, err := range []error{
				ns.nl.LinkSetGSOMaxSize(link, size), ns.nl.LinkSetGROMaxSize(link, size),
				ns.nl.LinkSetGSOIPv4MaxSize(link, size), ns.nl.LinkSetGROIPv4MaxSize(link, size),
			} {
				if err != nil && !errors.Is(err, unix.EINVAL) {
					return fmt.Errorf("set the largest size of %s in %s: %w", link.Attrs().Name, ns.name, err)
				}
			}
		}
	}
	return nil
}
