package lab

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue is the kernel's struct ethtool_value.
type ethtoolValue struct {
	command, value uint32
}

// ethtoolRequest is the kernel's struct ifreq as SIOCETHTOOL reads it.
type ethtoolRequest struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

// offloads are the switches that SetOffloads turns: checksums of what is sent and received, segmentation, and
// the merging of what is received.
var offloads = map[string]uint32{
	"rx checksum": unix.ETHTOOL_SRXCSUM,
	"tx checksum": unix.ETHTOOL_STXCSUM,
	"TSO":         unix.ETHTOOL_STSO,
	"GSO":         unix.ETHTOOL_SGSO,
	"GRO":         unix.ETHTOOL_SGRO,
}

// SetOffloads turns all checksum and segmentation offloads of a link on or off.
func (ns *Namespace) SetOffloads(name string, on bool) error {
	value := uint32(0)
	if on {
		value = 1
	}
	// Segmentation needs checksums: off it goes before them, on it goes after them.
	order := []string{"rx checksum", "tx checksum", "TSO", "GSO", "GRO"}
	if !on {
		order = []string{"GRO", "GSO", "TSO", "tx checksum", "rx checksum"}
	}
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a socket for ethtool: %w", err)
		}
		defer unix.Close(fd)
		for _, what := range order {
			setting := ethtoolValue{command: offloads[what], value: value}
			request := ethtoolRequest{data: unsafe.Pointer(&setting)}
			copy(request.name[:unix.IFNAMSIZ-1], name)
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
			if errno != 0 && !errors.Is(errno, unix.EOPNOTSUPP) {
				return fmt.Errorf("set %s of %s in %s to %d: %w", what, name, ns.name, value, errno)
			}
		}
		return nil
	})
}
