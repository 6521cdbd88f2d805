package lab

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// SendFrame sends Ethernet frames out of a link as they are given.
func (ns *Namespace) SendFrame(name string, frames ...[]byte) error {
	return ns.sendOut(name, func(int) error { return nil }, frames...)
}

// Offload is a checksum that a sender leaves to whoever carries its frame out.
type Offload struct {
	// SumStart is where the part of the frame begins that it covers, SumOffset from there where it is written.
	SumStart, SumOffset int
}

// header is the kernel's struct virtio_net_hdr, which asks for the checksum and for no segments.
func (o Offload) header() []byte {
	const needsChecksum = 1
	h := []byte{needsChecksum, 0}
	for _, v := range []int{0, 0, o.SumStart, o.SumOffset} {
		h = binary.NativeEndian.AppendUint16(h, uint16(v))
	}
	return h
}

// SendOffloaded sends an Ethernet frame out of a link that is not finished yet.
func (ns *Namespace) SendOffloaded(name string, frame []byte, o Offload) error {
	return ns.sendOut(name, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)
	}, append(o.header(), frame...))
}

func (ns *Namespace) sendOut(name string, prepare func(fd int) error, all ...[]byte) error {
	l, err := ns.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("send a frame from %s: %w", ns.name, err)
	}
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a packet socket in %s: %w", ns.name, err)
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index}
		err = prepare(fd)
		for _, what := range all {
			err = errors.Join(err, unix.Sendto(fd, what, 0, to))
		}
		if err != nil {
			return fmt.Errorf("send a frame from %s: %w", ns.name, err)
		}
		return nil
	})
}
