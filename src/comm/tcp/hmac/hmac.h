/* HMAC-SHA-256 (RFC 2104, FIPS 180-4): libcrypto's or libsodium's, opened at run time, or libsodium's source in
 * sodium_sha256.c where neither is installed. */
#ifndef DC_COMM_TCP_HMAC_H
#define DC_COMM_TCP_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DC__MAC_BYTES = 32 };

enum dc__hmac_provider { DC__HMAC_LIBCRYPTO, DC__HMAC_LIBSODIUM, DC__HMAC_REFERENCE, DC__HMAC_PROVIDERS };

/* Uses the first provider that is installed and does not refuse. */
void dc__hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t bytes, unsigned char mac[32]);
/* Uses one provider, for tests; false if it is not installed or refuses. */
bool dc__hmac_sha256_by(enum dc__hmac_provider provider, const void *key, size_t key_bytes, const void *data,
                        size_t bytes, unsigned char mac[32]);
/* Takes the same time wherever the codes differ. */
bool dc__mac_equal(const unsigned char a[32], const unsigned char b[32]);
/* Random bytes of the system; false with errno. */
bool dc__random_bytes(void *to, size_t bytes);

void dc__hmac_sha256_reference(const void *key, size_t key_bytes, const void *data, size_t bytes,
                               unsigned char mac[32]);
void dc__sha256_reference(const void *data, size_t bytes, unsigned char digest[32]);

#endif
